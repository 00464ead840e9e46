"""Does what a retract needs on every server: its order, the save, the drafts' inputs, penalties, stale copies."""

"""A resume from a copy against the recompute of the same tokens."""

"""Extends the engine's memory pools with host copies. Importing a module needs sglang; this package does not."""

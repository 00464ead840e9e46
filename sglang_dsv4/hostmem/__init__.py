"""Holds host copies: one pinned arena, a block pool for each group, HostCopy handles."""

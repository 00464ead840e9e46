"""Holds host copies: one pinned arena, a pool of its equal units, HostCopy handles."""

"""Keeps the cache of sessions beyond the life of their server, in a storage backend of the engine."""

"""Keeps the cache of finished requests on the host, for the next turn of their sessions."""

"""Keeps the cache of requests that have ended, for the next turn."""

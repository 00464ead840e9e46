"""Describes the bytes of a request's cache. Pure Python, NumPy and torch: no engine import."""

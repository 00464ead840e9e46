"""What a request's cache is made of. Pure Python, NumPy and torch: no engine import."""

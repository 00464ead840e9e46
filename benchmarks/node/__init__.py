"""Ranks that share an arena: two that move a request together, and many that come, go and die."""

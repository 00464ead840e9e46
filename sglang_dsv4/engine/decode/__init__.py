"""Serves the retracts of a decode server: the queue where they wait, and the recompute of those without a copy."""

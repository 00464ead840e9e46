"""HiSparse servers: what a retract keeps in the coordinator's host pool, and how a request gets it back."""

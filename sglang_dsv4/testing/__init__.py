"""Holds the servers that tests, demo and drills run on the CPU: the engine's own code, and no model."""

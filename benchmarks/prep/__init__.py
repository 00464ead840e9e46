"""Decode metadata against the engine's eager builder."""

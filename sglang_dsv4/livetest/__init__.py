"""Runs live servers, sends them requests, and reads what they did: the parts of ``stress``, ``drill`` and ``demo``."""

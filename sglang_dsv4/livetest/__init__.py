"""Runs live servers, sends them requests, and reads their counts: the parts of ``stress``, ``drill`` and ``demo``."""

"""A model package for measurements: the shipped model, and the time of every resume written to ``$PROBE_OUT``."""

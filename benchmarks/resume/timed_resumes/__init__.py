"""A model package for measurements: the shipped model, each resume's time written to ``$TIMED_RESUMES_FILE``."""

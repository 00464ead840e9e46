"""Holds retracted requests back in a server under test, as a file says: a model package, never for real requests.

``SGLANG_EXTERNAL_MODEL_PACKAGE=hold_resumes``, and a word in the file of ``HOLD_RESUMES_FILE`` (see ``switch``).
"""

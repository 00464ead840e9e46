"""A model package for one drill: a decode server whose retracted requests stay away for as long as a file says.

``SGLANG_EXTERNAL_MODEL_PACKAGE=sglang_dsv4.livetest.hold_resumes``, and a word in the file that ``HOLD_RESUMES_FILE``
names (see ``switch``). Never for real requests.
"""

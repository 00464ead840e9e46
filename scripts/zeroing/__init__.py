"""A model package for one experiment: a decode server that damages what it loads, on purpose.

``SGLANG_EXTERNAL_MODEL_PACKAGE=zeroing`` with this folder's parent on PYTHONPATH, and a word in the file that
``ZERO_FAMILY_FILE`` names (see ``switch``). Never part of an installation.
"""

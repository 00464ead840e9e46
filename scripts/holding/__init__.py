"""A model package for one drill: a decode server whose retracted requests stay away for as long as a file says.

``SGLANG_EXTERNAL_MODEL_PACKAGE=holding`` with this folder's parent on PYTHONPATH, and a word in the file that
``HOLDING_FILE`` names (see ``switch``). Never part of an installation.
"""

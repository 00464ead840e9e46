"""A model package for one measurement: a decode server that runs with and without this package's hooks in turn.

``SGLANG_EXTERNAL_MODEL_PACKAGE=alternating`` with this folder's parent on PYTHONPATH, and the variables of ``switch``.
Never part of an installation.
"""

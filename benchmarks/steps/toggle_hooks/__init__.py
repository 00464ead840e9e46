"""A model package for one measurement: a decode server that runs with and without this package's hooks in turn.

``SGLANG_EXTERNAL_MODEL_PACKAGE=benchmarks.steps.toggle_hooks`` with the checkout on PYTHONPATH, and the variables of
``switch``. Never for real requests.
"""

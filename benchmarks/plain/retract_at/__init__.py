"""A model package for live checks: a plain server that retracts a request at the token that its name says.

A request called ``NAME@312`` is retracted once, when its answer has 312 tokens, if another one runs that has more.
``SGLANG_EXTERNAL_MODEL_PACKAGE=benchmarks.plain.retract_at`` with the checkout on PYTHONPATH, and the variable of
``sglang_dsv4.livetest.zeroing``. Never for real requests.
"""

"""A model package for live checks: a plain server that retracts a request at the token that its name says.

A request called ``NAME@312`` is retracted once, when its answer has 312 tokens, if another one runs that has more. What
a load does not write of the pages that it gets is poison. ``NAME!312``: besides, its half-loaded page is published.
``SGLANG_EXTERNAL_MODEL_PACKAGE=benchmarks.plain.retract_at`` with the checkout on PYTHONPATH. Never for real requests.
"""

AT, UNREPAIRED = "@", "!"  # between a request's name and its token

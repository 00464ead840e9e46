"""A model package for one measurement: a plain server that saves every other retracted request, and notes each return.

``SGLANG_EXTERNAL_MODEL_PACKAGE=benchmarks.plain.timed_restores`` with the checkout on PYTHONPATH, and the file of the
notes in ``TIMED_RESTORES_FILE``. Never for real requests.
"""

VARIABLE = "TIMED_RESTORES_FILE"

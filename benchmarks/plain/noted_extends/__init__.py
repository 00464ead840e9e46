"""A model package for one measurement: a server that notes the prefix of each extend of one token that it runs.

``SGLANG_EXTERNAL_MODEL_PACKAGE=benchmarks.plain.noted_extends`` with the checkout on PYTHONPATH, and the file of the
notes in ``NOTED_EXTENDS_FILE``. Never for real requests.
"""

VARIABLE = "NOTED_EXTENDS_FILE"

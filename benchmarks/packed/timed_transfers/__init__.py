"""A model package for one measurement: a server that notes each transfer, its checksums, and wears its pages down.

``SGLANG_EXTERNAL_MODEL_PACKAGE=benchmarks.packed.timed_transfers`` with the checkout on PYTHONPATH, and the file of the
notes in ``TIMED_TRANSFERS_FILE``. Never for real requests.
"""

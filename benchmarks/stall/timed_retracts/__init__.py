"""A model package for one measurement: a decode server of which every other retract waits on the host, as all once did.

``SGLANG_EXTERNAL_MODEL_PACKAGE=benchmarks.stall.timed_retracts`` with the checkout on PYTHONPATH, and the file of the
notes in ``TIMED_RETRACTS_FILE``. Never for real requests.
"""

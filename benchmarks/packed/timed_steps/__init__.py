"""A model package for one measurement: a server that notes what each forward takes the GPU, and wears its pages down.

``SGLANG_EXTERNAL_MODEL_PACKAGE=benchmarks.packed.timed_steps`` with the checkout on PYTHONPATH, and the file of the
notes in ``TIMED_STEPS_FILE``. Never for real requests.
"""

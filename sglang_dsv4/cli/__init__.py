"""The ``sglang-dsv4`` command."""

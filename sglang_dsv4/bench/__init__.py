"""Benchmarks of ``sglang-dsv4 bench``: ``transfer`` and ``prep`` are command lines that write ``FOLDER/NAME.json``."""

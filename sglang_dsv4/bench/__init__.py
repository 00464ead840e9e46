"""Benchmarks: each module is a command line that takes ``--out FOLDER`` and writes ``FOLDER/NAME.json``."""

"""Implements the ``sglang-dsv4`` command, a module a subcommand."""

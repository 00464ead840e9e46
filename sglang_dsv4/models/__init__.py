"""Provides the external model package: ``SGLANG_EXTERNAL_MODEL_PACKAGE=sglang_dsv4.models``.

The engine registers every ``EntryClass`` found here over its own model of the same name.
"""

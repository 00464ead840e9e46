"""Extends SGLang for DeepSeek-V4 with exact host copies of retracted requests."""

__version__ = "0.3.0"

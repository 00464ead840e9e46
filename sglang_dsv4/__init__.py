"""SGLang extension for DeepSeek-V4: exact host copies of retracted requests."""

__version__ = "0.3.0"

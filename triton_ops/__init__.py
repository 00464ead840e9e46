"""Triton operations on DeepSeek-V4 cache buffers; each module is one operation and its torch twin."""

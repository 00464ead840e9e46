"""Implements Triton operations on DeepSeek-V4 cache buffers; a module has the kernel and its torch twin."""

"""Writes a small real DeepSeek-V4 checkpoint: config, tensors, tokenizer."""

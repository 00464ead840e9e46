"""Writes the config and the tokenizer of a small DeepSeek-V4."""

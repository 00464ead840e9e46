"""What a small real DeepSeek-V4 checkpoint is made of: its config, its tensors, its tokenizer."""

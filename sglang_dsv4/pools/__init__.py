"""The memory-pool subclasses. Importing them needs sglang; importing this package does not."""

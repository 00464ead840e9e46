"""A plain server in miniature: the engine's own scheduler, allocator, tree and pools on the CPU, and no model."""

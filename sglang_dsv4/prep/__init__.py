"""The metadata of a decode step: planned on the CPU, one staged copy, one fused kernel on a stream of its own."""

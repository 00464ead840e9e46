"""Prepares a decode step's metadata: planned on the CPU, one staged copy, one fused kernel on its own stream."""

"""Benchmarks of HiSparse servers."""

"""Builds pools, engine parts and stand-in servers for tests, demo, plan and benchmarks. No server imports it."""

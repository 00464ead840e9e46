"""Builds pools and engine parts without a server, for tests, demo, plan and benchmarks. No server imports it."""

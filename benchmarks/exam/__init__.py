"""Trains a small DeepSeek-V4 until its answers need every cache family, and asks served copies of it; see README.md."""

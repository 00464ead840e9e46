"""Transfers between servers, and steps, of pools whose pages lie otherwise."""

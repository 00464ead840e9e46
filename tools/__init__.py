"""Keeps this repository: nothing here is part of an installation."""

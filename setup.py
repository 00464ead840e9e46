"""Build entry point; everything is declared in pyproject.toml."""

from setuptools import setup

setup()

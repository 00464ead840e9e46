"""Measurements that need a checkout: one file each, see README.md."""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]

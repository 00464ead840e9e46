"""Measurements that need a checkout: one file each, see README.md."""

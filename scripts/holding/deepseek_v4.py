"""The package's own model, which puts the switch in its place."""

from __future__ import annotations

from patched_model import patched

from holding.switch import install

EntryClass = [patched(install)]

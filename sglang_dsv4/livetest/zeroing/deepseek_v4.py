"""Installs the switch in the package's own model."""

from __future__ import annotations

from sglang_dsv4.livetest.patched_model import patched
from sglang_dsv4.livetest.zeroing.switch import install

EntryClass = [patched(install)]

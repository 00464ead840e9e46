"""The package's own model, which puts the clock in its place."""

from __future__ import annotations

from benchmarks.packed.timed_steps.clock import install
from sglang_dsv4.livetest.patched_model import patched

EntryClass = [patched(install)]

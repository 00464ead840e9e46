"""The package's own model, which puts the switch in its place."""

from hold_resumes.switch import install
from sglang_dsv4.livetest.patched_model import patched

EntryClass = [patched(install)]

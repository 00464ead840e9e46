"""Tells the engine the facts of a GPU that this machine need not have."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

NVIDIA: dict[str, Any] = {"is_cuda": True, "is_hip": False}
AMD: dict[str, Any] = {"is_cuda": False, "is_hip": True}
NONE: dict[str, Any] = dict.fromkeys(
    ("is_sm90", "is_sm100", "is_sm100_or_sm110", "is_sm110", "is_sm120", "is_blackwell", "is_hopper_with_cuda_12_3"),
    False,
)
# By name, the engine's platform facts. device_capability is torch's: (9, 0).
GPUS: dict[str, dict[str, Any]] = {
    "sm90": NVIDIA | NONE | {"is_sm90": True, "is_hopper_with_cuda_12_3": True, "device_capability": (9, 0)},
    "sm100": NVIDIA | NONE | dict.fromkeys(("is_sm100", "is_sm100_or_sm110", "is_blackwell"), True)
    | {"device_capability": (10, 0)},
    "sm120": NVIDIA | NONE | dict.fromkeys(("is_sm120", "is_blackwell"), True) | {"device_capability": (12, 0)},
    "gfx950": AMD | NONE | {"device_capability": (9, 5)},
}  # fmt: skip
# Functions by which the engine asks for the same facts without its platform.
PROBES = {"is_sm90_supported": "is_sm90", "is_sm100_supported": "is_sm100", "is_sm120_supported": "is_sm120"}
AMD_PROBE = "is_gfx95_supported"
ASKED_BY = ("sglang.srt.arg_groups.", "sglang.srt.utils")  # modules that resolve launch arguments


@contextlib.contextmanager
def gpu_facts(gpu: str | None) -> Iterator[None]:
    """Answers the engine's questions for a GPU of ``GPUS``; None: for this machine's."""
    from sglang.srt.runtime_context import get_platform, override_platform  # noqa: PLC0415

    if gpu is None:
        with override_platform(is_cuda=not get_platform().is_hip):
            yield
        return
    major, minor = GPUS[gpu]["device_capability"]
    facts = GPUS[gpu] | {"device_sm": major * 10 + minor}
    probes = {name: bool(facts[fact]) for name, fact in PROBES.items()} | {AMD_PROBE: gpu == "gfx950"}
    with override_platform(**facts), _answering(probes):
        yield


@contextlib.contextmanager
def _answering(probes: Mapping[str, bool]) -> Iterator[None]:
    """Replaces ``probes`` in each loaded module that has them by their names."""
    import sglang.srt.server_args  # noqa: F401, PLC0415 - loads the modules that ask

    replaced = []
    for module in [module for name, module in sys.modules.items() if name.startswith(ASKED_BY)]:
        for name in probes.keys() & vars(module).keys():
            replaced.append((module, name, getattr(module, name)))
            setattr(module, name, lambda answer=probes[name]: answer)
    try:
        yield
    finally:
        for module, name, probe in replaced:
            setattr(module, name, probe)

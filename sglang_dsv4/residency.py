"""Sends a constant table to the rank's card once; from then on it is used by its handle.

    spec   = TensorSpec("owner.table", (128,), torch.int32, Kind.CONSTANT, resident="card")
    handle = residents.upload(spec, table)      # at start; the handle is the tensor on the card
    kernel[grid](handle, ...)                   # at every step; nothing is looked up

``residents.sent_bytes`` counts the bytes: a steady retract sends none.

Only constants stay. A tensor that is written (an output, a cache pool, an activation) would be stale on the card or
lost, and one step's metadata would be read by the next. A spec that marks one of them resident cannot be made, neither
anew nor by ``dataclasses.replace``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch

from sglang_dsv4.errors import HostCopyError

Resident = Literal["card"]


class ResidencyError(HostCopyError, ValueError):
    """A tensor cannot stay on the card as declared; the message names the tensor and the rule."""


class Kind(Enum):
    """Lists the uses of a tensor; messages quote the value."""

    CONSTANT = "a constant"
    CACHE_POOL = "a cache pool"
    STEP_METADATA = "per-step metadata"
    ACTIVATION = "an activation"


@dataclass(frozen=True)
class TensorSpec:
    """Declares a tensor and whether it stays on the card.

    name: unique in its registry, "owner.table". is_output: a kernel writes it. resident: None: it does not stay;
    "card": it does. Raises ResidencyError for a tensor that must not stay there, however the spec is made.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind
    is_output: bool = False
    resident: Resident | None = None

    def __post_init__(self) -> None:
        if self.resident not in {None, "card"}:
            raise ResidencyError(f"{self.name}: resident must be None or 'card', not {self.resident!r}")
        if self.resident and (self.is_output or self.kind is not Kind.CONSTANT):
            kept = "an output" if self.is_output else self.kind.value
            raise ResidencyError(f"{self.name}: {kept} must not be resident")


class Residents:
    """Holds one owner's tensors on this rank's card. Not thread-safe; made and used by the rank's own thread.

    sent_bytes: bytes uploaded so far. Handles live as long as this registry, or a reference to them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sent_bytes = 0
        self._handles: dict[str, torch.Tensor] = {}

    def upload(self, spec: TensorSpec, tensor: torch.Tensor) -> torch.Tensor:
        """Sends ``tensor`` once and returns the handle, a contiguous tensor on the card.

        tensor: on the host, of the spec's shape and dtype; it is copied, later changes to it are not seen. The bytes
        are on the card when this returns: any stream may read them. The handle is read-only. Raises ResidencyError,
        and then nothing is sent.
        """
        self._check(spec, tensor)
        # A blocking copy: torch waits for it on the host, so that no stream needs an event to read the bytes.
        handle = torch.empty(spec.shape, dtype=spec.dtype, device=self.device).copy_(tensor)
        self._handles[spec.name] = handle
        self.sent_bytes += handle.nbytes
        return handle

    def constant(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Uploads a constant, the usual table."""
        return self.upload(TensorSpec(name, tuple(tensor.shape), tensor.dtype, Kind.CONSTANT, resident="card"), tensor)

    def _check(self, spec: TensorSpec, tensor: torch.Tensor) -> None:
        if spec.resident is None:
            raise ResidencyError(f"{spec.name}: {spec.kind.value} that is not resident is not uploaded here")
        if spec.name in self._handles:
            raise ResidencyError(f"{spec.name}: the name is given twice")
        if tensor.device.type != "cpu":
            raise ResidencyError(
                f"{spec.name}: a resident tensor is uploaded from the host, this is on {tensor.device}"
            )
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise ResidencyError(
                f"{spec.name}: declared {spec.dtype} {list(spec.shape)}, got {tensor.dtype} {list(tensor.shape)}"
            )

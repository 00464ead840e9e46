"""Names the part of a request that a save copies, made once where the request is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_dsv4.pools.kept_rows import KeptRows
from sglang_dsv4.transfer.locate import Request


@dataclass(frozen=True)
class SaveRequest:
    """Tells ``CopyService.save`` what to copy. It changes nothing on its way."""

    request: Request  # on the device
    saved: Sequence[int] = ()  # host units that hold its first pages already; the copy holds them, too
    kept: KeptRows | None = None  # has detached the request's HiSparse rows; the copy takes them
    wait: bool = True  # until the bytes are on the host
    first_page: int = 0  # the first that needs a unit
    tail: bool = True  # whether the copy has one

    @property
    def tokens(self) -> int:
        """Counts the tokens of the request."""
        return int(self.request.indices.shape[0])

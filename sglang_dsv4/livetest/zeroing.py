"""Zeroes a cache family in each copy before its load, so that a check of the answers is seen to fail.

One word in a file, read at every load, says which:

    off         nothing
    <family>    that family's bytes of the copy are zero before they are loaded
    choices     the rows of recorded choices are, and no byte of the cache
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dsv4.livetest.in_server import around, environment

if TYPE_CHECKING:
    from sglang_dsv4.hostmem.memory import HostCopy

OFF = "off"  # the word that leaves every load as it is
CHOICES = "choices"


def switched_by(word: Path) -> dict[str, str]:
    """Returns the environment of a server whose loads the file ``word`` damages; it says OFF."""
    return environment(f"{__name__}:install", word, OFF)


def install(file: Path) -> None:
    """Wraps the loads of this process, of requests and of sessions, below the engine's calls and above the transfer.

    A copy that was damaged is not compared with the saved bytes. A session keeps its units after a load, and so their
    damage: with the word off again it goes by a flush alone.
    """
    from sglang_dsv4.pools.copy_service import CopyService  # noqa: PLC0415 - commands without torch import this file

    def load(original: Callable[..., None], host: CopyService, copy: HostCopy, *args: Any, **kwargs: Any) -> None:
        family = file.read_text().strip()
        if family != OFF:
            zero(copy, family)
            copy.checksums = None
        original(host, copy, *args, **kwargs)

    around(CopyService, "_load", load)


def zero(copy: HostCopy, name: str) -> int:
    """Zeroes the bytes of family ``name`` in ``copy``, every layer, row and plane, or its rows of CHOICES; returns how
    many. ValueError: no such one.
    """
    from sglang_dsv4.cache.packed import PackedPage  # noqa: PLC0415 - as above
    from sglang_dsv4.transfer.reference import put_tail, tail_image  # noqa: PLC0415

    if name == CHOICES:
        return sum(copy.memory.host_rows[unit].zero_().numel() for unit in copy.pages(copy.begins))
    family = next((family for family in copy.memory.families if family.name == name), None)
    if family is None:
        raise ValueError(f"no cache family {name!r}")
    if family.whole_pages:
        page, layers = PackedPage.of(copy.memory.families), range(len(family.layers))
        pages = [copy.memory.bytes_of(unit) for unit in copy.pages(copy.begins)]
        parts = [unit[page.offset(family, layer) :][: family.page_bytes] for unit in pages for layer in layers]
        return sum(part.zero_().numel() for part in parts)
    image = tail_image(copy)
    zeroed = sum(image[part].zero_().numel() for part in copy.memory.tail(copy.tokens).layers(family))
    put_tail(copy, image)
    return zeroed

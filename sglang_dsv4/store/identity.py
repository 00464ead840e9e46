"""Says which server's bytes another server may load: those of the same model, in the same layout on the host.

Not of it: ranks, ring sizes and the order of pages on the device, for the packed units do not depend on them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sglang_dsv4.cache.family import Family
from sglang_dsv4.cache.packed import PackedPage, Tail
from sglang_dsv4.errors import SettingError

ENDS = 1 << 20  # bytes that are hashed of each end of a file of weights
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def layout(families: Iterable[Family], page_size: int, unit_bytes: int) -> list[Any]:
    """Describes the bytes of a page and of the window before a page end."""
    members = list(families)
    page, tail = PackedPage.of(members), Tail.of(members, page_size)
    said: list[Any] = [page_size, unit_bytes, page.nbytes, tail.nbytes, page.offsets, tail.offsets]
    for one in members:
        planes = [[plane.offset if one.whole_pages else 0, plane.row_bytes] for plane in one.planes]
        rows = one.tile_rows if one.whole_pages else one.live_rows(page_size)
        said.append([one.name, one.layers, one.ratio, rows, planes])
    return said


def model_digest(folder: str, config: str = "config.json") -> str:
    """Digests a folder of a model, or of an adapter: its configuration, and names, sizes and both ends of its weights.

    Raises SettingError where there is no such folder.
    """
    path = Path(folder)
    if not (path / config).is_file():
        raise SettingError(f"DSV4_STORE: {folder} has no {config} to tell the model by; set DSV4_STORE_MODEL")
    found = hashlib.sha256((path / config).read_bytes())
    for index in sorted(path.glob("*.index.json")):
        found.update(index.read_bytes())
    for weights in sorted(file for pattern in WEIGHTS for file in path.glob(pattern)):
        size = weights.stat().st_size
        found.update(f"{weights.name} {size}".encode())
        with weights.open("rb") as file:
            found.update(file.read(ENDS))
            file.seek(max(0, size - ENDS))
            found.update(file.read(ENDS))
    return found.hexdigest()


def folder_of(model: str, revision: str | None) -> str:
    """Returns the folder of a model, which may be named as on the hub. Raises SettingError where it is not here."""
    if Path(model).is_dir():
        return model
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - the engine has it
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return str(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise SettingError(f"DSV4_STORE: the files of {model} are not found; set DSV4_STORE_MODEL") from error


def encoded(parts: Mapping[str, Any]) -> bytes:
    """Encodes what a server's bytes depend on, alike on every server."""
    return json.dumps(parts, sort_keys=True, default=str).encode()

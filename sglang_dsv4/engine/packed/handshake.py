"""Two servers that lay pages out differently would take each other's bytes for their own.

The engine's handshake compares what both say of the cache's numbers, before anything is sent, and refuses a peer that
says something else. A page-major server says its layout there, whatever the transfer backend: a stock server, and one
of ours without the setting, get no cache from it and give it none.
"""

from __future__ import annotations

from typing import Any

SAID = ", DSV4_LAYOUT=page-major"


def before_manager(self: Any, args: Any, *others: Any, **more: Any) -> None:
    """BEFORE CommonKVManager.__init__, where DSV4_LAYOUT=page-major."""
    args.kv_cache_dtype_str = f"{args.kv_cache_dtype_str}{SAID}"

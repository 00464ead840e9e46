"""A transfer is measured beside the engine's own page kernel, which not every installation has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def page_kernel() -> Callable[..., Any] | None:
    """``(source table, target table, source pages, target pages, page bytes, layers)``; None where it is not built."""
    try:
        from sgl_kernel.kvcacheio import transfer_kv_all_layer_mla  # noqa: PLC0415
    except ImportError:
        return None
    kernel: Callable[..., Any] = transfer_kv_all_layer_mla
    return kernel

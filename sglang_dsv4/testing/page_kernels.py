"""Finds the engine's own page kernel, to measure a transfer beside; not every installation has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def page_kernel() -> Callable[..., Any] | None:
    """Returns the engine's page kernel; None where it is not built.

    Its arguments: ``(source table, target table, source pages, target pages, page bytes, layers)``.
    """
    try:
        from sgl_kernel.kvcacheio import transfer_kv_all_layer_mla  # noqa: PLC0415
    except ImportError:
        return None
    kernel: Callable[..., Any] = transfer_kv_all_layer_mla
    return kernel

"""Answers for SGLang 0.5.22, where they differ from the newest release's."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from sglang_dsv4.engine.releases import base


class Release(base.Release):
    """Has no bounded replay of an encoder's window."""

    @override
    def row_floor(self, forward_batch: Any) -> Any:
        return None

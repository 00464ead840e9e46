"""Answers for SGLang 0.5.22, where they differ from the newest release's."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from sglang_dsv4.engine.releases import base


class Release(base.Release):
    """Has no row floor of an encoder's replay, cuts windows in a decoder's, and gives NIXL no event."""

    nixl_gets_the_event = False
    replay_cuts_windows = True

    @override
    def row_floor(self, forward_batch: Any) -> Any:
        return None

    @override
    def replayed_tail(self, tree: Any, req: Any) -> int:
        return int(tree.swa_reprefill_tail_tokens())

    @override
    def keep_early_send(self, original: Any, scheduler: Any, req: Any) -> Any:
        if scheduler.enable_staging and req.early_send_prefix_end is None:
            req.early_send_prefix_end = 0  # it must stay the same over the request's batches

"""The engine's weight updater, which knows nothing of copies: every way to write weights makes the waiting ones stale.

Trainers of reinforcement learning pause a server, release its memory, resume it, write weights and go on. Requests that
wait with a copy live through that: they hold nothing on the device.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from typing_extensions import override

from sglang_dsv4.engine.saving import wait_for_given_pages
from sglang_dsv4.engine.waiting_copies import set_aside
from sglang_dsv4.engine.weights import changing_weights


class WeightUpdater(SchedulerWeightUpdaterManager):
    """Stock updater, around whose writes the version of the weights changes."""

    @override
    def update_weights_from_disk(self, recv_req: Any) -> Any:
        with changing_weights():
            return super().update_weights_from_disk(recv_req)

    @override
    def update_weights_from_distributed(self, recv_req: Any) -> Any:
        with changing_weights():
            return super().update_weights_from_distributed(recv_req)

    @override
    def update_weights_from_tensor(self, recv_req: Any) -> Any:
        with changing_weights():
            return super().update_weights_from_tensor(recv_req)

    @override
    def update_weights_from_ipc(self, recv_req: Any) -> Any:
        with changing_weights():
            return super().update_weights_from_ipc(recv_req)

    @override
    def release_memory_occupation(self, recv_req: Any) -> Any:
        """The engine asserts that nothing waits, forgets what does, and unmaps the cache before it synchronizes.

        Weights that were released are gone.
        """
        wait_for_given_pages(self.scheduler)
        with ExitStack() as stack:
            stack.enter_context(set_aside(self.scheduler))
            if not recv_req.tags or GPU_MEMORY_TYPE_WEIGHTS in recv_req.tags:
                stack.enter_context(changing_weights())
            return super().release_memory_occupation(recv_req)

    # Weights can also be written from outside, between these two calls.
    @override
    def begin_weight_update(self, recv_req: Any) -> Any:
        with changing_weights():
            return super().begin_weight_update(recv_req)

    @override
    def end_weight_update(self, recv_req: Any) -> Any:
        with changing_weights():
            return super().end_weight_update(recv_req)

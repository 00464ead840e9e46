"""Pieces of a real engine for the drills: its plugin loader run again, pools, requests that retract and resume."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from sglang_dsv4.engine import saving
from sglang_dsv4.engine.decode import recompute
from sglang_dsv4.engine.state import server
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.pools.copy_service import CopyService
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.demo_scheduler import Job, Scheduler
from sglang_dsv4.testing.standalone import PoolSpec, make_pool

SPEC = PoolSpec(pages=12, swa_pages=12, requests=4)


@contextlib.contextmanager
def a_new_process() -> Iterator[None]:
    """As in a fresh process of the server: its plugins are loaded, and no pool has been built. Undone afterwards."""
    with mock.patch.object(server, "landing", None):
        yield


def start_pool() -> Any:
    """What the scheduler does next: build the pool."""
    return make_pool(SPEC)


def attach(settings: Settings, spec: PoolSpec = SPEC) -> CopyService | None:
    """What a decode server does then: reserve the host memory of a new pool."""
    host: CopyService | None = make_pool(spec).attach_host(settings)
    return host


class Decoding:
    """A decode scheduler over a real pool and allocator, and running requests of ``lengths`` tokens."""

    def __init__(self, settings: Settings, *lengths: int) -> None:
        self._scheduler = Scheduler(SPEC, random.Random(0), corrupt=False)
        self.host: CopyService = self._scheduler.pool.attach_host(settings)
        self.jobs = [Job(number, tokens, 1) for number, tokens in enumerate(lengths)]
        for job in self.jobs:
            assert self._scheduler.admit(job), "the drill's pool is too small for its requests"

    def copy_of(self, number: int) -> HostCopy:
        """The copy of job ``number``, which was saved."""
        copy = self.jobs[number].copy
        assert copy is not None, f"job {number} has no copy"
        return copy

    def save(self, job: Job) -> bool:
        """Save as the hooks do at a retract; False when the engine's own behaviour follows."""
        req = SimpleNamespace(rid=f"r{job.number}", input_embeds=None)
        job.copy = saving.save(self._scheduler.pool, req, job.slots, job.slot)
        return job.copy is not None

    def retract(self, job: Job) -> None:
        """Save, give the pages away and let others write over them."""
        self._scheduler.retract(job)

    def resume(self, job: Job) -> None:
        """Load the copy into other pages. Raises what the load raises."""
        assert self._scheduler.resume(job), "the drill's pool has no room for the resume"

    @property
    def wrong(self) -> list[str]:
        """Bytes of resumed requests that are not those that were computed."""
        return self._scheduler.result.mismatches

    def answer_without_copy(self) -> dict[str, Any]:
        """The end of a request that has no copy and cannot be computed again, as its client gets it."""
        from sglang.srt.managers.schedule_batch import Req  # noqa: PLC0415
        from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: PLC0415

        streamed: list[Any] = []
        streamer = SimpleNamespace(stream_output=lambda reqs, return_logprob: streamed.extend(reqs))
        req = Req("chat-7", "", [1, 2, 3], SamplingParams(max_new_tokens=8), vocab_size=1 << 16)
        recompute.answer_without_copy(SimpleNamespace(output_streamer=streamer), req)
        answer: dict[str, Any] = streamed[0].finished_reason.to_json()
        return answer

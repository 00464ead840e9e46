"""Runs many requests on a decode server at little cost: the rows of a step are written for all of them at once.

No step is judged here: what a decode server writes to a store is judged where it is read. Tokens are drawn ahead, and
the first tokens of all prompts, which are not to be copied, do not arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from decode_world import DecodeWorld
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_dsv4.testing.content import PrefixLedger
from sglang_dsv4.testing.forward import Forward
from sglang_dsv4.testing.ledger import BY_REQUEST, PAGE, Ledger, Part, live_from, locations

ELSEWHERE = 77  # positions between a rejected draft's row and the one whose bytes it gets


class Crowd(Ledger):
    """Gives the rows of requests with these ``tokens``, ``[requests, length]``; positions count on through them."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens, self.length = tokens, tokens.shape[1]
        self._noise = np.concatenate([PrefixLedger(row)._noise for row in tokens])

    def row(self, part: Part, positions: torch.Tensor) -> torch.Tensor:
        """Returns the bytes of ``positions`` in ``part``."""
        return super().row(part, positions + part.family.startswith("draft"))


class CrowdForward(Forward):
    """Writes what a batch computes, and reads nothing."""

    def __call__(self, batch: Any) -> Any:
        """Returns the scheduler's result for ``batch``, a decode step."""
        world, had = self._world, batch.seq_lens.tolist()
        tokens, numbers = world.crowd.tokens, [world.numbers[req.rid] for req in batch.reqs]
        at = list(zip(numbers, had, batch.req_pool_indices.tolist(), strict=True))
        if width := world.spec.drafts:
            return self._verified(batch, at, width)
        world.put_rows([(number, end - 1, row) for number, end, row in at])
        sampled = [int(tokens[number, end]) for number, end, _ in at]
        world.scheduler.future_map.tokens.update(zip((row for *_, row in at), sampled, strict=True))
        batch.input_ids = None
        return GenerationBatchResult(next_token_ids=torch.tensor(sampled))

    def _verified(self, batch: Any, at: Sequence[tuple[int, int, int]], width: int) -> Any:
        world, given = self._world, []
        counts = [1 + int(world.crowd.tokens[number, had]) % width for number, had, _ in at]
        drafts = [(number, had + ahead, row) for number, had, row in at for ahead in range(width)]
        accepted = [ahead < count for count in counts for ahead in range(width)]
        world.put_rows(drafts, [0 if right else ELSEWHERE for right in accepted])
        for (number, had, _), count in zip(at, counts, strict=True):
            given += [*world.crowd.tokens[number, had + 1 : had + 1 + count].tolist(), *[0] * (width - count)]
        batch.seq_lens = batch.seq_lens + torch.tensor(counts)
        batch.seq_lens_cpu = batch.seq_lens.clone()
        batch.spec_info = self._draft_input(batch)
        return GenerationBatchResult(
            next_token_ids=torch.tensor(given), accept_lens=torch.tensor(counts), speculative_num_draft_tokens=width
        )


class CrowdWorld(DecodeWorld):
    """Runs a decode server for the requests of ``crowd``. known: tokens of their prompts that do not arrive."""

    crowd: Crowd
    known = 0

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self._forward = CrowdForward(self)
        self.numbers: dict[str, int] = {}

    def join(self, prompt: int, answer: int) -> Any:
        """Lets the prompt of the next request of the crowd arrive; so many tokens of it, and of its answer."""
        number = len(self.requests)
        self.numbers[f"r{number}"] = number
        return self.submit(self.crowd.tokens[number, :prompt].tolist(), max_new=answer)

    def put_rows(self, places: Sequence[tuple[int, int, int]], away: Any = 0) -> None:
        """Writes the row of each (request, position, slot). away: positions between it and the one of its bytes."""
        number, position, row = torch.tensor(places).unbind(1)
        full = self.table.req_to_token[row, position].long()
        of = number * self.crowd.length + position + torch.tensor(away)
        swa = self.pool.full_to_swa_index_mapping[full]
        assert bool((swa > 0).all()), "a step has no window"
        for part in self.parts():
            if part.family in BY_REQUEST:
                self.crowd.put(part, of, row * part.ring + position % part.ring)
            elif part.ratio:
                ends = (full + 1) % part.ratio == 0
                self.crowd.put(part, of[ends], full[ends] // part.ratio)
            else:
                self.crowd.put(part, of, swa // PAGE * part.ring + swa % part.ring if part.ring else swa)

    def _arrive(self, req: Any, count: int) -> None:
        number, slots, row = self.numbers[req.rid], self.slots(req, count), int(req.kv.req_pool_idx)
        req.output_ids[0] = int(self.crowd.tokens[number, count])
        for part in self.parts():
            first = max(self.known, live_from(part.family, count))
            positions, rows = locations(part, self.pool, slots, first, row)
            self.crowd.put(part, number * self.crowd.length + positions, rows)
        self.computed[req.rid] = count

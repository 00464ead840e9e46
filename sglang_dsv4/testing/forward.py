"""Stands in for a forward: reads a request's rows, writes new ones, and names the rows that are wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.eagle_info import EagleDraftInput

from sglang_dsv4.testing.content import PrefixLedger, next_token

if TYPE_CHECKING:
    from sglang_dsv4.testing.world import PlainWorld


class WrongRows(AssertionError):
    """Reports that a step, or a match in the tree, would have read bytes of other tokens."""


class Forward:
    """Runs a batch's forward in ``world``. Raises WrongRows where it would read a byte that is not the request's."""

    def __init__(self, world: PlainWorld) -> None:
        self._world = world

    def __call__(self, batch: Any) -> Any:
        """Returns the scheduler's result for ``batch``."""
        world = self._world
        decode = batch.forward_mode.is_decode()
        if decode and world.spec.drafts:
            return self._verify(batch)
        if batch.forward_mode.is_mixed() and world.spec.drafts:
            self._bind_tails(batch)
        ends, rows = batch.seq_lens_cpu.tolist(), batch.req_pool_indices.tolist()
        counts = [1] * len(ends) if decode else batch.extend_lens
        done, sampled, relay, computed = 0, [], world.scheduler.future_map.tokens, []
        for req, row, end, count in zip(batch.reqs, rows, ends, counts, strict=True):
            slots = world.table.req_to_token[row, :end].to(torch.int64)
            given = batch.out_cache_loc[done : done + count].to(torch.int64)
            assert torch.equal(slots[end - count :], given), f"{req.rid}: the table does not hold what was allocated"
            self._check_input(batch, req, done, end, count)
            tokens, ledger = world.tokens(req, end), world.ledger(req, end)
            assert not decode or relay[row] == tokens[-1], f"{req.rid}: another token than its last one goes in"
            world.check_reads(ledger, slots[: end - count], row, req.rid, 0 if decode else end)
            world.write(ledger, slots, end - count, row, decode)
            world.computed[req.rid] = end
            computed.append((tokens, count))
            sampled.append(next_token(tokens))
            relay[row] = sampled[-1]
            done += count
        batch.input_ids = None
        if world.spec.drafts:
            batch.spec_info = self._draft_input(batch)
        choices = world.choices.record(batch.out_cache_loc, computed, world.spec.overlap)
        return GenerationBatchResult(next_token_ids=torch.tensor(sampled), **choices)

    def _bind_tails(self, batch: Any) -> None:
        """Gives the decoding requests of a mixed batch their lengths, as FutureMap.resolve_mixed_spec_tails does.

        The scheduler does not know how many drafts the step in flight accepts.
        """
        count = len(batch.decoding_reqs or ())
        lengths, places = batch.seq_lens.clone(), batch.out_cache_loc.clone()
        for at in range(-count, 0):
            computed = self._world.computed[batch.reqs[at].rid]
            lengths[at] = computed + 1
            places[at] = self._world.table.req_to_token[int(batch.req_pool_indices[at]), computed]
        batch.seq_lens, batch.seq_lens_cpu, batch.out_cache_loc = lengths, lengths.clone(), places

    def _verify(self, batch: Any) -> Any:
        """Verifies a step with drafts: some are accepted; the rows of the others are garbage that must not be read."""
        world = self._world
        width, tokens, accepted, written, computed = world.spec.drafts, [], [], [], []
        for req, row, had in zip(batch.reqs, batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True):
            slots = world.table.req_to_token[row, : had + width].to(torch.int64)
            world.check_reads(world.ledger(req, had), slots[:had], row, req.rid)
            world.write(PrefixLedger(range(had + width + 1)), slots, had, row, decode=True)
            count = 1 + world.tokens(req, had + 1)[-1] % width
            world.write(world.ledger(req, had + count), slots[: had + count], had, row, decode=True)
            world.computed[req.rid] = had + count
            written.append(slots[had:])
            known = world.tokens(req, had + count)
            computed.append(([*known, *range(width - count)], width))
            tokens += [*world.tokens(req, had + count + 1)[had + 1 :], *[0] * (width - count)]
            accepted.append(count)
        batch.seq_lens = batch.seq_lens + torch.tensor(accepted)
        batch.seq_lens_cpu = batch.seq_lens.clone()
        batch.spec_info = self._draft_input(batch)
        choices = world.choices.record(torch.cat(written), computed, world.spec.overlap)
        return GenerationBatchResult(
            next_token_ids=torch.tensor(tokens), accept_lens=torch.tensor(accepted), speculative_num_draft_tokens=width,
            **choices,
        )  # fmt: skip

    def _draft_input(self, batch: Any) -> Any:
        """Makes the state that a step hands to the next: an empty one, as there is no model."""
        count = len(batch.reqs)
        if self._world.spec.overlap:
            made = EagleDraftInput()
            made.future_indices = batch.req_pool_indices
            return made
        return EagleDraftInput(
            topk_p=torch.zeros(count, 1), topk_index=torch.zeros(count, 1, dtype=torch.int64),
            hidden_states=torch.zeros(count, 1), bonus_tokens=torch.zeros(count, dtype=torch.int64),
        )  # fmt: skip

    def _check_input(self, batch: Any, req: Any, done: int, end: int, count: int) -> None:
        """Checks that the tokens a prefill puts in are those of the positions that it computes."""
        given = getattr(batch, "prefill_input_ids_cpu", None)
        if not batch.forward_mode.is_decode() and given is not None and done + count <= len(given):
            wanted = self._world.tokens(req, end)[end - count :]
            assert given[done : done + count].tolist() == wanted, f"{req.rid}: its input"

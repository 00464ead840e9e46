"""A retract sends the state of its drafts to the host behind the gather alone, while the forward still runs."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dsv4.engine.retract import drafts
from sglang_dsv4.engine.state import DraftInputs, server

SLOTS, ROWS, HIDDEN = 16, 4, 16_384
SLEEP = 2_000_000_000  # cycles of the card: about a second


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    kept, server.draft_inputs = server.draft_inputs, DraftInputs()
    drafts.want(lambda req: req)
    yield
    server.draft_inputs = kept


def held(lengths: list[int]) -> Any:
    """The relay's buffers, of ``lengths`` tokens by slot."""
    return SimpleNamespace(
        topk_p_buf=torch.rand(SLOTS, 1, device="cuda"),
        topk_index_buf=torch.randint(1 << 16, (SLOTS, 1), device="cuda"),
        hidden_states_buf=torch.randn(SLOTS, HIDDEN, device="cuda").to(torch.bfloat16),
        new_seq_lens_buf=torch.tensor(lengths, device="cuda"),
    )


def batch_of(future_map: Any, slots: torch.Tensor, lengths: torch.Tensor) -> Any:
    """A batch whose draft's inputs were gathered just now, on the current stream."""
    state = {name: getattr(future_map, f"{name}_buf")[slots] for name in drafts.CARRIED}
    reqs = [SimpleNamespace(rid=str(row), seqlen=101 + row) for row in range(ROWS)]
    return SimpleNamespace(
        reqs=reqs, enable_overlap=True, seq_lens=lengths, spec_algorithm=SimpleNamespace(need_topk=lambda: True),
        spec_info=SimpleNamespace(**state, future_indices=slots),
    )  # fmt: skip


def retract(behind: bool, cycles: int, in_flight: bool = True) -> tuple[Any, dict[str, torch.Tensor], list[bool]]:
    """(request, what its step began with, whether a forward of ``cycles`` was over at the return, and at its state)."""
    future_map, forward = held([7] * SLOTS), torch.cuda.Stream()
    slots = torch.tensor([3, 9, 1, 12], device="cuda")
    lengths = torch.arange(100, 100 + ROWS, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(forward):
        batch = batch_of(future_map, slots, lengths)
        drafts.after_resolve_spec_extras(None, future_map, batch)
        wanted = {name: getattr(batch.spec_info, name)[2].clone() for name in drafts.CARRIED}
        torch.cuda._sleep(cycles)
        future_map.hidden_states_buf.zero_()
        ended = torch.cuda.Event()
        ended.record()
    if behind:
        torch.cuda.current_stream().wait_stream(forward)
    drafts.put_back(batch, 2, in_flight)
    over = [ended.query()]
    drafts.restore_draft_state(batch.reqs[2])
    return batch.reqs[2], wanted, [*over, ended.query()]


@pytest.mark.parametrize("behind", (False, True), ids=("the scheduler is told early", "it is behind the forward"))
def test_a_retract_does_not_wait_for_the_running_forward(behind: bool) -> None:
    """In stream order the forward has written over the relay; what its step began with comes back.

    The first retract of a process makes its stream and pinned memory, and loads each kernel that it launches, for which
    the host waits until the card is idle; so does this test's own work behind the forward. Hence one before.
    """
    retract(behind, 1)
    torch.cuda.synchronize()
    req, wanted, over = retract(behind, SLEEP)
    assert over == [False, behind], "the host waited for the forward"
    for name, attribute in drafts.CARRIED.items():
        found = getattr(req, attribute)
        assert found.device.type == "cpu" and torch.equal(found, wanted[name].cpu())

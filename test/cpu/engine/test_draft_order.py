"""The state of a retracted request's drafts goes to the host behind all that makes it, and its memory lives until then.

Held against vector clocks: the relay's writer is the forward in flight, on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clocks import Race
from ordered_card import OrderedCard, ordered_card
from played_card import OnTheCpu

from sglang_dsv4.engine.retract import drafts
from sglang_dsv4.engine.state import DraftInputs, server

SLOTS = 16


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[OrderedCard]:
    monkeypatch.setattr(server, "draft_inputs", DraftInputs())
    with OnTheCpu(), ordered_card(monkeypatch) as found:
        for name in ("Stream", "Event", "current_stream", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(found, name))
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        drafts.want(lambda req: req)
        yield found


class Relay:
    """The engine's buffers by slot, and its forwards."""

    def __init__(self, card: OrderedCard) -> None:
        self.card = card
        self.topk_p_buf, self.topk_index_buf = torch.rand(SLOTS, 1), torch.randint(99, (SLOTS, 1))
        self.hidden_states_buf = torch.randn(SLOTS, 32)
        self.new_seq_lens_buf = torch.arange(100, 100 + SLOTS)

    def gather(self, slots: torch.Tensor, reqs: list[Any]) -> Any:
        """A step begins: its batch with inputs of its own."""
        state = {name: getattr(self, f"{name}_buf")[slots] for name in drafts.CARRIED}
        batch = SimpleNamespace(
            reqs=reqs, enable_overlap=True, seq_lens=self.new_seq_lens_buf[slots],
            spec_algorithm=SimpleNamespace(need_topk=lambda: True),
            spec_info=SimpleNamespace(**state, future_indices=slots),
        )  # fmt: skip
        drafts.after_resolve_spec_extras(None, self, batch)
        return batch

    def write(self) -> None:
        """A step ends: its outputs."""
        self.new_seq_lens_buf.add_(2)
        for name in drafts.CARRIED:
            getattr(self, f"{name}_buf").add_(1)


def play(card: OrderedCard, taken: bool, in_flight: bool) -> None:
    """A retract while the result of the last step is not taken, or when it is; the next step follows."""
    relay, slots = Relay(card), torch.tensor([3, 9, 1]).clone()
    reqs = [SimpleNamespace(rid=str(row), seqlen=101 + slot) for row, slot in enumerate((3, 9, 1))]
    card.forward.wait_stream(card.main)
    with card.stream(card.forward):
        batch = relay.gather(slots, reqs)
        wanted = [getattr(batch.spec_info, name)[2].tolist() for name in drafts.CARRIED]
        relay.write()
    if taken:
        card.forward.synchronize()
        reqs[2].seqlen += 2
        with card.stream(card.forward):
            wanted = [getattr(relay, f"{name}_buf")[1].tolist() for name in drafts.CARRIED]
    drafts.put_back(batch, 2, in_flight)
    for _ in range(3):
        torch.zeros(32)  # memory that went back is another tensor's now
    card.forward.wait_stream(card.main)
    with card.stream(card.forward):
        relay.write()
    drafts.restore_draft_state(reqs[2])
    found = [getattr(reqs[2], attribute) for attribute in drafts.CARRIED.values()]
    assert [one.tolist() for one in found] == wanted
    card.main.wait_stream(card.forward)
    server.draft_inputs.step = None


@pytest.mark.parametrize("taken", [False, True], ids=["in flight", "taken"])
def test_every_read_is_behind_its_writer(card: OrderedCard, taken: bool) -> None:
    play(card, taken, in_flight=not taken)


def test_the_relay_is_being_written_by_a_step_in_flight(card: OrderedCard) -> None:
    """The check itself: of such a step it must not be read."""
    with pytest.raises(Race, match=r"was written by aten\.add_"):
        play(card, taken=False, in_flight=False)
    card.main.wait_stream(card.forward)

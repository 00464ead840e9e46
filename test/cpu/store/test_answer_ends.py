"""A prefill server goes on from answers that end at each place in a page, every byte judged."""

from __future__ import annotations

import numpy as np
import pytest
from answers import PAGE, VOCABULARY, Pair, shared_store
from crowd import Crowd, CrowdWorld
from plain_world import naive_pages

KNOWN, PROMPT, END = 1024, 1277, 1280  # tokens: of all prompts together, of a prompt, up to the answer's first page end
RUNNING, JOIN = 48, 8  # requests at once, and new ones of a pass; no more may pass a page end in one
ROOM = {"requests": RUNNING, "pages": RUNNING * 7, "swa_pages": RUNNING * 3}


@pytest.fixture(autouse=True)
def _pages():
    with naive_pages():
        yield


def ended(pair, tokens, ends):
    """Runs requests that begin with the same tokens; returns them in the order of ``ends``, tokens behind END."""
    pair.prefill.submit(tokens[0, :PROMPT].tolist(), max_new=1)
    pair.prefill.run(check=False)
    world, reqs = pair.decode, []
    world.crowd, world.known = Crowd(tokens), KNOWN
    while len(reqs) < len(ends) or world.running:
        for end in ends[len(reqs) :][: min(JOIN, len(world.table.free_slots))]:
            reqs.append(world.join(PROMPT, END + end + 1 - PROMPT))
        world.step()
    pair.settle()
    return reqs


@pytest.mark.parametrize("drafts", [0, 1, 4, 8])
def test_an_answer_may_end_at_each_place_of_a_page(monkeypatch, drafts):
    """At all 256 without drafts; with them, whose last may lie behind the end, at every sixteenth and the last ones."""
    shared_store(monkeypatch)
    monkeypatch.setenv("DSV4_HOST_GB", "0.1")
    pair = Pair(decode=CrowdWorld, room=ROOM, drafts=drafts, overlap=not drafts)
    rng = np.random.default_rng(drafts)
    places = {*range(2 * drafts - 2 + drafts % 2, PAGE, 16), *range(PAGE - 1 - drafts, PAGE)} if drafts else range(PAGE)
    ends = rng.permutation(sorted(places)).tolist()
    tokens = rng.integers(VOCABULARY, size=(len(ends), END + 2 * PAGE))
    tokens[:, : KNOWN + 1] = tokens[0, : KNOWN + 1]
    reqs = ended(pair, tokens, ends)
    given = [len(req.origin_input_ids) + len(req.output_ids_through_stop) for req in reqs]
    assert given == [END + end + 1 for end in ends]
    computed = [min(req.seqlen - 1, tokens) for req, tokens in zip(reqs, given, strict=True)]
    assert pair.next_turns_apart(reqs) == [(tokens - bool(drafts)) // PAGE * PAGE for tokens in computed]
    pair.nothing_left()

"""Requests of DeepSeek-V4.1 on a decode server: exact after a resume, also with images, which stock aborts."""

from __future__ import annotations

from itertools import chain, repeat
from typing import Any

import oracle
import pytest
import torch
from retracting import is_503, outputs
from server_fixture import V41, World

from sglang_dsv4.livetest.zeroing.switch import zero


@pytest.mark.parametrize("overlap", (False, True))
@pytest.mark.parametrize("n", (3, 130, 257, 1000))
def test_it_comes_back_exactly_whether_a_token_is_pending_or_not(n: int, overlap: bool) -> None:
    """With a forward in flight, which has a slot and may write the other row of the ring of two."""
    world = World(V41)
    world.admit(40, "neighbour")
    req = world.admit(n, overlap=overlap)
    oracle.fill(world.pool, seed=n)
    expected, old = world.read(req), world.slot(req)
    assert bool({key for key in expected if key[0] == "c2_state"}) == bool(n % 2)
    copy = world.park(req)
    assert copy.tokens == n
    world.admit(n + 1, "taker")
    oracle.fill(world.pool, seed=n + 7)
    assert world.resume() == [req] and world.slot(req) != old
    oracle.compare(expected, world.read(req))
    world.nothing_held()


def with_an_image(req: Any) -> torch.Tensor:
    """Give ``req`` an image, as the engine's processor would; its feature."""
    from sglang.srt.managers.schedule_batch import MultimodalDataItem, MultimodalInputs
    from sglang.srt.multimodal.modality import Modality

    feature = torch.ones(4, 8)
    item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(3, 6)], feature=feature)
    req.multimodal_inputs = MultimodalInputs(mm_items=[item])
    return feature


@pytest.mark.parametrize("refuse", (None, "a layout from tomorrow"))
def test_a_request_with_images_resumes_where_stock_aborts_it(refuse: str | None) -> None:
    world = World(V41, refuse=refuse)
    text, image, stays = outputs(world, (130, 257, 300))
    feature = with_an_image(image)
    oracle.fill(world.pool, seed=1)
    expected = world.read(image)
    retracted, _, aborted = world.retract_decode([text, image, stays], chain([False], repeat(True)))
    if refuse:  # the engine as it is
        assert (retracted, aborted) == ([text], [image]) and is_503(image.to_finish)
        return
    assert (retracted, aborted) == ([text, image], [])
    oracle.fill(world.pool, seed=2)
    for req in retracted:
        world.requeue(req)
    assert world.resume() == [text, image]
    oracle.compare(expected, world.read(image))
    image.init_next_round_input(None)  # what the engine does with a request that joins the batch
    assert image.multimodal_inputs.mm_items[0].feature is feature
    assert list(image.full_untruncated_fill_ids) == [*image.origin_input_ids, *image.output_ids]
    world.nothing_held()


def test_the_family_that_an_experiment_zeroes_is_gone_and_no_other() -> None:
    """On a real pool: whatever a family's tiles and planes, ``stress --zero`` takes all of it."""
    world = World(V41)
    req = world.admit(391)
    oracle.fill(world.pool, seed=3)
    expected = world.read(req)
    names = {family for family, _, _ in expected}
    assert names == {"c1_kv", "c1_indexer", "c2_kv", "c2_indexer", "swa_kv", "c2_state"}
    for name in sorted(names):
        copy = world.park(req)
        assert zero(copy, name) > 0
        oracle.fill(world.pool, seed=4)
        assert world.resume() == [req]
        found = world.read(req)
        changed = {key[0] for key, row in expected.items() if found[key] != row}
        assert changed == {name}
        assert not any(any(row) for key, row in found.items() if key[0] == name)
        oracle.fill(world.pool, seed=3)
        expected = world.read(req)

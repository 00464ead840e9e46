"""Provides the engine's way from a batch to the metadata in a graph: raw inputs that stay in place."""

from types import SimpleNamespace

import numpy as np
import torch
from prep_fixture import PrepWorld, flatten, ordered


class CaptureBatch(SimpleNamespace):
    """Plays a forward batch of fixed size, filled anew before each replay as by the engine's runner."""

    def fill(self, world, lengths) -> None:
        """Fills the batch of ``lengths`` in it, padding behind, and the raw inputs made anew out of the graph."""
        world.place(np.array(lengths))
        placed, queries = world.placed, world.drafts or 1
        for mine, theirs, padding in (
            (self.req_pool_indices, placed.req_pool_indices, 0),
            (self.seq_lens, placed.seq_lens, 1),
            (self.out_cache_loc, placed.out_cache_loc, 0),
        ):
            mine.fill_(padding)
            mine[: len(theirs)] = theirs
        self.seq_lens_sum = int(self.seq_lens.sum())
        self.seq_lens_cpu = self.seq_lens.cpu()  # read where there is no GPU
        self.positions = self.seq_lens.repeat_interleave(queries)
        world.backend.init_forward_metadata_out_graph(self)


def capture_batch(world, size: int) -> CaptureBatch:
    """Returns the engine's dummies, with which it captures."""
    device, queries = world.table.device, world.drafts or 1
    longs = {"dtype": torch.int64, "device": device}
    return CaptureBatch(
        **{
            **vars(world.placed), "batch_size": size, "req_pool_indices": torch.zeros(size, **longs),
            "seq_lens": torch.ones(size, **longs), "seq_lens_cpu": None, "seq_lens_sum": size,
            "out_cache_loc": torch.zeros(size * queries, **longs), "positions": torch.zeros(size * queries, **longs),
        }
    )  # fmt: skip


def captured(world, batch):
    """Returns the raw metadata that a capture of ``batch`` begins with."""
    world.backend.init_cuda_graph_state(batch.batch_size, batch.batch_size * (world.drafts or 1))
    world.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    return world.backend.forward_metadata


def make(world, raw, how=None):
    """Returns the metadata object of ``raw``; how: the function that makes it, None: as hooked."""
    name = f"make_forward_metadata_from_raw_{'verify' if world.drafts else 'decode'}"
    method = getattr(type(world.backend), name)
    return (how(method) if how else method)(world.backend, raw)


def engines(method):
    """Returns the engine's own method below the hook."""
    assert method.__wrapped__ is not None
    return method.__wrapped__


def from_raw(world, raw, how=None):
    """Returns every field of ``make`` by path."""
    return ordered(flatten(make(world, raw, how)))


def draft_world(monkeypatch, lengths, **kind):
    """Returns a draft model's backend, whose layers have the window alone, with this package's kernel."""
    world = PrepWorld(lengths, ratios=(0,), **kind)
    world.runner.is_draft_worker = world.backend.is_draft_runner = True
    world.attach(monkeypatch)
    return world


def extended(world, how=None):
    """Returns the metadata object of a draft model's extend of the placed batch; how: as in ``make``."""
    method = type(world.backend).init_forward_metadata_draft_extend
    placed = world.placed
    return (how(method) if how else method)(
        world.backend, placed.req_pool_indices, placed.seq_lens, world.drafts, placed.out_cache_loc
    )

"""0.5.17: what the layers of a prefill's chunk share is the engine's, byte for byte, and nobody asks the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server_fixture import ON_0517

from sglang_dsv4.engine import prefill_chunk

pytestmark = pytest.mark.skipif(not ON_0517, reason="0.5.22 and later sum on the host themselves")

WINDOW, CONTEXT, SLOTS = 128, 700, 8
FIELDS = ("swa_token_ids", "swa_first_pos", "swa_gather_lens", "swa_offsets")
REQUEST = st.tuples(st.integers(0, 400), st.integers(1, 300))  # tokens that the tree holds, tokens of the chunk


def chunk(requests: list[tuple[int, int]], seed: int = 0) -> dict[str, torch.Tensor]:
    """What the engine's builder is given: requests of (prefix, new) tokens in any rows of the table."""
    noise = torch.Generator().manual_seed(seed)
    pool = SLOTS * CONTEXT
    return {
        "seq_lens": torch.tensor([prefix + new for prefix, new in requests], dtype=torch.int32),
        "extend_seq_lens": torch.tensor([new for _, new in requests], dtype=torch.int32),
        "req_pool_indices": torch.randperm(SLOTS, generator=noise)[: len(requests)].int(),
        "req_to_token": torch.randperm(pool, generator=noise).int().view(SLOTS, CONTEXT),
        "full_to_swa": torch.randint(1 << 20, (pool + 1,), generator=noise),
    }


def batch_of(requests: list[tuple[int, int]], mode: str = "EXTEND") -> Any:
    """The host's side of the same chunk."""
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode), _original_forward_mode=None,
        extend_seq_lens_cpu=[new for _, new in requests],
        seq_lens_cpu=torch.tensor([prefix + new for prefix, new in requests]),
    )  # fmt: skip


class Kernel:
    """The engine's kernel in torch: the interpreter takes seconds."""

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def launch(
            out: Any, first: Any, counts: Any, offsets: Any, rows: Any, table: Any, stride: int, swa: Any
        ) -> None:
            assert stride == table.stride(0)
            for number in range(grid[0]):
                start, count, at = (int(tensor[number]) for tensor in (first, counts, offsets))
                assert at + count <= len(out), "written behind the list"
                out[at : at + count] = swa[table[rows[number], start : start + count].long()].int()

        return launch


def use(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """What is not asked about is left out: indices of the layers, whose kernel the interpreter does not take."""
    from sglang.srt.layers.attention.dsv4 import sparse_prefill_utils as utils

    monkeypatch.setattr(utils, "combine_topk_swa_indices", lambda **_: (None, None))
    if kernel == "in torch":
        monkeypatch.setattr(utils, "_build_swa_token_ids_kernel", Kernel())


def build(given: dict[str, torch.Tensor], batch: Any, cache: Any = None) -> Any:
    """As the engine's layers build it, through both hooks."""
    from sglang.srt.layers.attention.dsv4 import sparse_prefill_utils as utils

    queries = int(given["extend_seq_lens"].sum())
    backend = SimpleNamespace(forward_metadata=SimpleNamespace(sparse_prefill_cache=cache))

    def layer(*_: Any, **__: Any) -> Any:
        return utils.SparsePrefillChunkCache.build(
            **given, swa_window_size=WINDOW, swa_page_size=256, num_qo_tokens=queries, max_seq_len=CONTEXT
        )

    return prefill_chunk.forward_prefill_sparse(layer, backend, None, 0, 0, batch)


def engines(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The engine's own function, as it stands behind the hook."""
    from sglang.srt.layers.attention.dsv4 import sparse_prefill_utils as utils

    found: tuple[torch.Tensor, ...] = utils.build_swa_token_ids(**given, swa_window=WINDOW)
    return found


def check(requests: list[tuple[int, int]], seed: int) -> None:
    given = chunk(requests, seed)
    wanted = engines(given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "item", lambda _: pytest.fail("the host waits for the device"))
        made = build(given, batch_of(requests))
    for name, tensor in zip(FIELDS, wanted, strict=True):
        found = getattr(made, name)
        assert found.dtype == tensor.dtype and found.is_contiguous() and torch.equal(found, tensor), name


@settings(max_examples=200, deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=6), st.integers(0, 99))
def test_every_byte_is_the_engines(requests: list[tuple[int, int]], seed: int) -> None:
    """Any mix of prompts, chunks behind other chunks, and prefix hits."""
    with pytest.MonkeyPatch.context() as patch:
        use(patch, "in torch")
        check(requests, seed)


def test_so_it_is_with_the_engines_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "interpreted")
    check([(130, 3), (0, 40)], 1)


@pytest.mark.parametrize(
    "why", ["a mixed batch", "decode beside prefills", "no lengths", "other requests", "built by another layer"]
)
def test_where_the_host_may_not_know_the_device_is_asked(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that is too small would let the kernel write behind its list."""
    use(monkeypatch, "in torch")
    requests = [(0, 200), (300, 64), (5, 1)]
    given, batch = chunk(requests), batch_of(requests, "MIXED" if why == "a mixed batch" else "EXTEND")
    if why == "decode beside prefills":
        batch._original_forward_mode = SimpleNamespace(name="DECODE")
    if why == "no lengths":
        batch.seq_lens_cpu = None
    if why == "other requests":
        batch.seq_lens_cpu, batch.extend_seq_lens_cpu = batch.seq_lens_cpu[:2], batch.extend_seq_lens_cpu[:2]
    asked: list[Any] = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: asked.append(tensor) or item(tensor))
    made = build(given, batch, cache="there already" if why == "built by another layer" else None)
    assert len(asked) == 1
    assert torch.equal(made.swa_token_ids, engines(given)[0])
    assert prefill_chunk._state["lengths"] is None

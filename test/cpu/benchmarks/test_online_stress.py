"""Rows of online compression: a late copy is seen in its block's row, and the benchmark runs to its end."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from fake_http import COPIED, Decode, running, series
from sglang.kernels.ops.attention.dsv4 import CompressorDecodePlan
from sglang.srt.layers.attention.dsv4 import compressor_v2
from sglang.srt.layers.attention.dsv4.compressor_v2 import CompressorBackendMixin

from benchmarks import in_server, online_stress
from benchmarks.online_stress import BLOCK, LATE, LATE_COPIES, RETRACTED, Rows
from sglang_dsv4.livetest import runs

WIDTH, LAYERS = 8, (3, 5)

# ---------------------------------------------------------------------- in the server


class Steps(CompressorBackendMixin):
    """Runs the engine's way through a compressor over two layers; each token is folded in as its kernel does."""

    def __init__(self, notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = Rows(notes)
        self.draw = torch.Generator().manual_seed(1)
        self.states = {layer: torch.zeros(6, 3 * WIDTH) for layer in LAYERS}
        self.bias = torch.randn(BLOCK, WIDTH, generator=self.draw)
        self.token_to_kv_pool = SimpleNamespace(
            uniform_fp8=False, layer_mapping=[(0, 0, object())] * 6, get_extra_key_buffer=lambda _: torch.zeros(1),
            get_extra_key_page_size=lambda _: 2, get_extra_key_layout=lambda _: "v4",
        )  # fmt: skip
        self.enable_deepseek_v4_fp4_indexer = False
        monkeypatch.setattr(compressor_v2, "_use_online_compress", lambda ratio: ratio == BLOCK)
        monkeypatch.setattr(compressor_v2, "compress_norm_rope_store", lambda *_, **__: None)
        monkeypatch.setattr(compressor_v2, "compress_forward", functools.partial(self.rows.compress, self.fold))

    def step(self, rids: list[str], lengths: list[int], slots: list[int]) -> None:
        """Runs one decode step; ``lengths`` have its token."""
        batch = SimpleNamespace(
            rids=rids, seq_lens_cpu=torch.tensor(lengths), req_pool_indices=torch.tensor(slots, dtype=torch.int32),
            forward_mode=SimpleNamespace(is_decode=lambda: True, is_idle=lambda: False),
        )  # fmt: skip
        plan = torch.tensor([lengths, slots, slots, [-1] * len(slots)], dtype=torch.int32).T.contiguous()
        self.forward_metadata = SimpleNamespace(
            c128_compress_metadata=CompressorDecodePlan(BLOCK, plan), core_metadata=SimpleNamespace(c128_out_loc=None)
        )
        for layer, states in self.states.items():
            compressor = SimpleNamespace(
                ratio=BLOCK, head_dim=WIDTH, is_in_indexer=False, rotate=False, ape=self.bias, freqs_cis=None,
                norm=SimpleNamespace(weight=None, variance_epsilon=0.0),
                compute_kv_score=lambda *_: torch.stack([inputs(length) for length in lengths]),
                get_state_pool=lambda _, states=states: SimpleNamespace(
                    kv_score_buffer=SimpleNamespace(kv_score=states)
                ),
            )  # fmt: skip
            self.rows.layer(CompressorBackendMixin.forward_core_compressor, self, None, batch, layer, compressor)

    def fold(self, *, kv_score_buffer, kv_score_input, ape, plan, head_dim, **_: object) -> torch.Tensor:
        out = torch.zeros(len(kv_score_input), head_dim)
        for at, (length, slot, *_) in enumerate(plan.plan_d.tolist()):
            kv, score = kv_score_input[at].view(2, head_dim)
            score = score + ape[(length - 1) % BLOCK]
            most, total, before = kv_score_buffer[slot, 0].view(3, head_dim).clone()
            if (length - 1) % BLOCK == 0:
                most, total, before = torch.full_like(kv, -torch.inf), torch.zeros_like(kv), torch.zeros_like(kv)
            highest = torch.maximum(most, score)
            old, new = total * (most - highest).exp(), (score - highest).exp()
            out[at] = (before * old + kv * new) / (old + new)
            if length % BLOCK:
                kv_score_buffer[slot, 0] = torch.cat([highest, old + new, out[at]])
        return out


def inputs(length: int) -> torch.Tensor:
    """Returns what the compressor gets of the token at this length: the same whenever it is computed again."""
    return torch.randn(2 * WIDTH, generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("begin", [0, 1, 60, 126, 127])
def test_a_copy_that_is_one_token_late_gives_another_row(tmp_path, monkeypatch, late, begin):
    """``a`` is retracted at 200 tokens, its state goes to another slot; ``b`` is not."""
    notes = tmp_path / "notes"
    world = Steps(notes, monkeypatch)
    for layer in LAYERS:  # what the prefill server sent of an open block
        sent = torch.randn(2, 3, WIDTH, generator=world.draw)
        world.states[layer][[1, 2]] = torch.cat([sent[:, :1], sent[:, 1:2].exp(), sent[:, 2:]], 1).flatten(1)
    for length in range(begin + 1, 201):
        world.step(["a", "b"], [length, length], [1, 2])
    if late:  # the step in flight, whose token is computed again behind the resume
        world.step(["a", "b"], [201, 201], [1, 2])
    world.rows.release(lambda *_: None, SimpleNamespace(reqs=[SimpleNamespace(rid="a")]), 0)
    for states in world.states.values():
        states[4], states[1] = states[1].clone(), torch.nan
    for length in range(202, 205):
        world.step(["b"], [length - (not late)], [2])
    for length in range(201, 257):
        world.step(["a"], [length], [4])
    found = in_server.read(notes)
    assert [line["retracted"] for line in found] == [False] * 4 + [True] * 2, "the second block of `a` alone"
    assert max(line["error"] for line in found[:4]) < 1e-5
    errors = [line["error"] for line in found[4:]]
    assert min(errors) > 1e-3 if late else max(errors) < 1e-5


# ---------------------------------------------------------------------- the command


class Pair(Decode):
    """Plays the decode server: it copies for each request, and notes two rows, as bad as it was told."""

    log, notes = Path(), Path()
    copies: ClassVar = [0]
    late, errors = False, (1e-7, 1e-7, 0.1)

    def do_POST(self) -> None:
        self.copies[0] += 1
        with self.log.open("a") as out:
            out.write(COPIED)
        whole, retracted, late = self.errors
        in_server.note(self.notes, layer=3, retracted=False, error=whole)
        in_server.note(self.notes, layer=3, retracted=True, error=late if self.late else retracted)
        super().do_POST()

    def do_GET(self) -> None:
        self.begin()
        if self.path == "/metrics":
            self.wfile.write(series(self.copies[0]))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command beside played servers; returns its status, the bounds that it misses, and what it started."""
    started = []

    def launch(role, model, words, environment, folder, transfer):
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"{role}.log"
        log.touch()
        started.append((role, words, environment, transfer))
        if role == "decode":
            monkeypatch.setattr(Pair, "copies", [0])
            Pair.log, Pair.notes, Pair.late = log, Path(environment[in_server.NOTES]), LATE in environment
        return SimpleNamespace(role=role, url=urls[role], log=log, alive=True)

    def command(*words, errors=Pair.errors):
        monkeypatch.setattr(Pair, "errors", errors)
        sizes = "--requests 9 --prompt 3 9 --new-tokens 4 8 --at-least 9"
        folders = ["--logs", str(tmp_path), "--out", str(tmp_path)]
        status = online_stress.main(["--model-path", "m", *sizes.split(), *folders, *words])
        bounds = json.loads((tmp_path / "online-stress.json").read_text())["bounds"]
        return status, [bound["name"] for bound in bounds if not bound["ok"]], started

    monkeypatch.setenv("SGLANG_OPT_USE_ONLINE_COMPRESS", "0")
    monkeypatch.setattr(runs.servers, "launch", launch)
    monkeypatch.setattr(runs.servers, "wait_until_up", lambda *_: None)
    monkeypatch.setattr(runs.servers, "stop_all", lambda _: {})
    monkeypatch.setattr(runs.servers, "end_when_told", lambda: None)
    monkeypatch.setattr(runs, "SETTLES", 0)
    monkeypatch.setattr(online_stress, "LEAST_ROWS", 9)
    monkeypatch.setattr(online_stress, "LATE_REQUESTS", 2)
    with running(Decode) as prefill, running(Pair) as decode:
        urls = {"prefill": prefill, "decode": decode}
        yield command


def test_it_runs_to_its_end(run):
    status, missed, started = run("--interval", "50", "--", "--mem-fraction-static", "0.3")
    assert (status, missed) == (0, [])
    assert [(role, transfer) for role, _, _, transfer in started] == [("prefill", "nixl"), ("decode", "nixl")] * 2
    assert all(words[-3:] == ["--disable-cuda-graph", "--mem-fraction-static", "0.3"] for _, words, _, _ in started)
    exact, late = (environment for role, _, environment, _ in started if role == "decode")
    assert exact["SGLANG_TEST_RETRACT_INTERVAL"] == late["SGLANG_TEST_RETRACT_INTERVAL"] == "50"
    assert (
        LATE not in exact
        and exact["DSV4_VERIFY"] == "1"
        and online_stress.os.environ["SGLANG_OPT_USE_ONLINE_COMPRESS"] == "1"
    )


@pytest.mark.parametrize(
    ("errors", "missed"),
    [
        ((1e-4, 1.9e-4, 0.1), []),
        ((1e-4, 2.1e-4, 0.1), [f"largest error of a row by rounding's, {RETRACTED}"]),
        ((1e-7, 2e-6, 0.1), [f"largest error of a row by rounding's, {RETRACTED}"]),
        ((1e-4, 1e-4, 1e-3), [f"median error of a row by rounding's, {LATE_COPIES}"]),
    ],
)
def test_rows_that_differ_and_late_copies_that_do_not_are_missed(run, errors, missed):
    assert run(errors=errors)[:2] == (int(bool(missed)), missed)

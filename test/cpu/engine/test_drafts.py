"""A draft model's window comes back with its request, wherever it comes back; without it, only the window is lost."""

import ast
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sglang
from server_fixture import SPEC, V41, World, since_0523

from sglang_dsv4.testing.standalone import PoolSpec

EAGLE, DSPARK = "EAGLE", "DSPARK"
LENGTHS = (3, 127, 128, 129, 256, 257, 383, 384, 385, 1000)


def there_and_back(world: World, n: int, overlap: bool) -> None:
    """A retract and resume of ``n`` tokens, with the rows that the draft reads."""
    world.admit(40, "neighbour")
    req = world.admit(n, overlap=overlap)
    rows = {position for family, _, position in world.read(req) if family == "draft_swa_kv"}
    assert rows == set(range(max(0, n - world.pool.draft_beside.rows), n))
    world.there_and_back(req, seed=n)


@pytest.mark.parametrize(("n", "overlap"), [*((n, True) for n in LENGTHS), *((n, False) for n in (127, 128, 256, 385))])
@pytest.mark.parametrize("algorithm", (EAGLE, DSPARK))
def test_its_rows_come_back_at_every_length(algorithm: str, n: int, overlap: bool) -> None:
    """127 rows for EAGLE, 128 for DSpark, over one window page and over two, the pages before them evicted."""
    there_and_back(World(draft=algorithm), n, overlap)


@pytest.mark.parametrize("algorithm", (EAGLE, DSPARK))
def test_beside_a_page_major_target(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose layout is another in the pages of all tokens alone: the draft has none."""
    monkeypatch.setenv("DSV4_LAYOUT", "page-major")
    there_and_back(World(draft=algorithm), 385, overlap=True)


@pytest.mark.parametrize(
    "spec",
    (V41, replace(V41, kv_layout="v41"), pytest.param(replace(V41, kv_layout="v41_new"), marks=since_0523)),
    ids=("v4 rows", "v41", "v41_new"),
)  # fmt: skip
def test_beside_a_v41_target_with_its_rows(spec: PoolSpec) -> None:
    there_and_back(World(spec, draft=EAGLE), 391, overlap=True)


def test_only_the_last_stage_of_a_pipeline_has_a_draft() -> None:
    stages = [replace(SPEC, stage=(0, 3)), replace(SPEC, stage=(3, 6))]
    first, last = World(stages[0]), World(stages[1], draft=EAGLE)
    assert (first.pool.draft, last.pool.draft.pool) == (None, last.draft_pool)
    there_and_back(last, 300, overlap=False)


def wider(pool: Any) -> None:
    pool.swa_kv_pool.kv_buffer = [b.new_zeros(len(b), b.shape[1] + 576) for b in pool.swa_kv_pool.kv_buffer]


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda pool: setattr(pool, name, change(getattr(pool, name)))


REFUSED: dict[str, Callable[[Any], None]] = {
    "mapped apart": lambda pool: pool.register_mapping(pool.full_to_swa_index_mapping.clone()),
    "wider rows": wider,
    "compressed": changed("compression_ratios", lambda _: [4]),
    "smaller": changed("swa_size", lambda size: size - 256),
    "no paged window": changed("swa_kv_pool", lambda _: None),
    "a ring by request": changed("swa_req_ring_size", lambda _: 256),
}


@pytest.mark.parametrize("case", REFUSED)
def test_where_the_drafts_layout_is_refused_the_target_comes_back(case: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world = World(draft=EAGLE, break_draft=REFUSED[case])
    assert caplog.text.count("the draft's cache is not copied") == 1
    assert world.pool.draft is None and world.pool.refusal is None
    world.pool.draft_beside = None
    world.there_and_back(world.admit(300))


def test_the_engine_starts_no_server_with_several_drafts_of_this_model() -> None:
    """It gives each of them a number, which this class does not take. Only the first one's window would be copied."""
    source = Path(sglang.__file__).parent / "srt/models/deepseek_v4_nextn.py"
    classes = {node.name: node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)}
    (made,) = (node for node in classes["DeepseekV4ForCausalLMNextN"].body if getattr(node, "name", "") == "__init__")
    assert isinstance(made, ast.FunctionDef) and made.args.kwarg is None
    assert "draft_model_idx" not in {argument.arg for argument in (*made.args.args, *made.args.kwonlyargs)}


@since_0523
@pytest.mark.parametrize("begins", [0, 200])
def test_a_dspark_draft_keeps_where_its_rows_begin(begins: int) -> None:
    """A prefill server whose draft began late says so by request slot, and the next slot's owner had another mark."""
    world = World(draft=DSPARK)
    marks = world.draft_pool.swa_valid_from
    req = world.admit(300)
    marks.fill_(5000)
    marks[world.slot(req)] = begins
    world.park(req)
    marks.fill_(5000)
    assert world.resume() == [req]
    assert int(marks[world.slot(req)]) == begins
    assert int((marks == 5000).sum()) == len(marks) - 1

"""Follows docs/extending.md to the letter, on every layout: a new ratio, and a new family."""

import ast
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import builders
import oracle
import pytest
import torch
from pretended_device import INTERPRETED, Device

from sglang_dsv4.cache import families as table
from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.cache.family import Family, Group
from sglang_dsv4.cache.page_major import is_covered
from sglang_dsv4.cli.plan_config import EXAMPLES, Variant, read_model
from sglang_dsv4.cli.plan_figures import family_figures
from sglang_dsv4.errors import LayoutRefused, VerifyMismatch
from sglang_dsv4.pools import describe
from sglang_dsv4.testing.ledger import parts, unjudged
from sglang_dsv4.testing.standalone import TINY41_RATIOS, TINY41_SOURCES, PoolSpec
from sglang_dsv4.transfer import verify
from sglang_dsv4.transfer.reference import ReferenceCopier

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/extending.md").read_text()
RATIO, RATIO_JUDGE, ENTRY, LINE, JUDGE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TOKENS = (1, 130, 257, 383, 515)
V41 = {"ratios": TINY41_RATIOS, "sources": TINY41_SOURCES}
LAYOUTS = {
    "V4": {"ratios": (0, 4, 128)}, "no layer of ratio 4": {"ratios": (0, 128)},
    "no layer of ratio 128": {"ratios": (0, 4)}, "no compressed layer": {"ratios": (0, 0)},
    "a stage without ratio 4": {"ratios": (0, 4, 128), "stage": (2, 3)}, "V4.1": V41,
    "drafts": {"ratios": (0, 4, 128), "draft_tokens": 4, "draft": 127},
    "DSpark": {"ratios": (0, 4, 128), "draft_tokens": 8, "draft": 128},
    "page-major": {"ratios": (0, 0, 4, 128, 4, 128, 4)},
}  # fmt: skip


def sketch(g: Geometry) -> Family:
    """What the entry says, evaluated where the page says it belongs."""
    family: Family = eval(f"({ENTRY}\n)[0]", {**vars(table), "g": g})
    return family


@pytest.fixture
def extend(monkeypatch) -> Callable[..., builders.Served]:
    """The edits of the page, and an engine whose pools have the new buffers; makes a pool of a layout."""
    written, make_pool = table._written, builders.make_pool
    monkeypatch.setattr(table, "_written", lambda g: (*written(g), sketch(g)))
    for key, kind in eval(JUDGE, vars(oracle)).items():
        monkeypatch.setitem(oracle.FAMILIES, key, kind)
    for key, found in eval(f"{{{LINE}}}").items():
        monkeypatch.setitem(describe.BUFFERS, key, found)

    def make(spec: Any) -> Any:
        pool = make_pool(spec)
        pages, layers = len(pool.swa_kv_pool.kv_buffer[0]), oracle.owners(pool, 4)
        pool.c4_sketch_buffers = [torch.zeros(pages, 256 * 48, dtype=torch.uint8) for _ in layers]
        return pool

    def world(layout: str = "V4") -> builders.Served:
        monkeypatch.setenv("DSV4_LAYOUT", "page-major" if layout == "page-major" else "stock")
        return builders.served(units=400, **LAYOUTS[layout])

    monkeypatch.setattr(builders, "make_pool", make)
    return world


def survives(world: builders.Served, tokens: int, copier: Any, finish: Callable[[], None] = lambda: None) -> None:
    """A request's rows after a retract, in other pages and another slot, and no other byte changed."""
    oracle.fill(world.pool, tokens)
    request, copy = world.start(tokens, 1), world.memory.allocate(tokens, world.side.geometry)
    wanted = oracle.read(world.pool, request.slots, tokens, 1)
    assert {key[0] for key in wanted} <= {family.name for family in world.side.families}
    copier.save(copy, world.request(request))
    finish()
    other = world.start(300, 2)  # so that the resumed request gets other pages
    oracle.release(world.allocator, request.slots)
    oracle.poison(world.pool)
    before, again = oracle.snapshot(world.pool), world.resume(tokens, 3)
    copier.load(copy, world.request(again))
    finish()
    oracle.compare(wanted, oracle.read(world.pool, again.slots, tokens, 3))
    oracle.assert_only_changed(before, world.pool, oracle.may_change(world.pool, again.slots, tokens, 3))
    oracle.cleared_ring_ok(world.pool, 3, tokens)
    copy.release()
    for one in (other, again):
        oracle.release(world.allocator, one.slots)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_new_family_survives_a_retract_on_every_layout(extend, layout):
    """A layout without its layers is served as before."""
    world = extend(layout)
    family = sketch(world.side.geometry)
    assert (family in world.side.families) is bool(family.layers)
    assert {key[0] for key in oracle.buffers(world.pool)} == {one.name for one in world.side.families}
    copier = ReferenceCopier(world.side, lambda: ())
    for tokens in TOKENS if layout == "V4" else (383,):
        survives(world, tokens, copier)


@pytest.mark.parametrize(
    ("layout", "kernels", "lengths"),
    [("V4", INTERPRETED, (257,)), ("drafts", INTERPRETED, (385,)), ("drafts", None, TOKENS), ("DSpark", None, TOKENS)],
)
def test_a_new_family_goes_through_the_kernels(monkeypatch, extend, layout, kernels, lengths):
    """Beside a draft's window, too; the interpreted ones at one length: they are slow."""
    world = extend(layout)
    device = Device(monkeypatch, kernels=kernels)
    copier = device.copier(world.side, world.memory)
    for tokens in lengths:
        survives(world, tokens, copier, device.finish)


RATIO_LAYOUTS = {"V4": (0, 4, 128, 0), "no layer of ratio 4": (0, 128, 0), "alone": (0, 0), "V4.1": TINY41_RATIOS}


def with_ratio_16(monkeypatch) -> None:
    for ratio, rule in eval(RATIO, vars(table)).items():
        monkeypatch.setitem(table.COMPRESSIONS, ratio, rule)
    for key, kind in eval(RATIO_JUDGE, vars(oracle)).items():
        monkeypatch.setitem(oracle.FAMILIES, key, kind)
    for module in (describe, table):  # what the modules make of the line when they are imported
        monkeypatch.setattr(module, "RATIOS", (0, *table.COMPRESSIONS))
    monkeypatch.setitem(describe.BUFFERS, "c16_kv", lambda pool: describe._kv(pool, 16))
    monkeypatch.setitem(describe.BUFFERS, "c16_state", lambda pool: describe._states("compress_state_pools", pool, 16))


@pytest.fixture(params=RATIO_LAYOUTS)
def ratio_16(request, monkeypatch) -> builders.Served:
    """An engine whose last layer has that ratio."""
    with_ratio_16(monkeypatch)
    make_pool, ratios = builders.make_pool, RATIO_LAYOUTS[request.param]

    def make(spec: Any) -> Any:
        pool = make_pool(spec)
        pool.compression_ratios = [*spec.ratios[:-1], 16]
        page = torch.zeros(spec.pages + 1, -(-16 * 584 // 576) * 576, dtype=torch.uint8)
        part = SimpleNamespace(kv_buffer=[page], page_size=16, get_bytes_per_token=lambda: 584)
        pool.kv_pools = {**describe._kv_pools(pool), 16: part}
        pool.index_pools = describe._index_pools(pool)
        ring = torch.zeros((spec.requests + 2) * 16 + 1, 1024)
        pool.compress_state_pools[-1] = SimpleNamespace(
            ratio=16, ring_size=16, kv_score_buffer=SimpleNamespace(kv_score=ring)
        )
        return pool

    monkeypatch.setattr(builders, "make_pool", make)
    return builders.served(ratios, units=400, sources=TINY41_SOURCES if ratios == TINY41_RATIOS else ())


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_new_ratio_is_one_line(ratio_16, tokens):
    """Its compressed rows and its pending states survive, wherever the request comes back."""
    assert {"c16_kv", "c16_state"} <= {family.name for family in ratio_16.side.families}
    survives(ratio_16, tokens, ReferenceCopier(ratio_16.side, lambda: ()))


def test_plan_and_page_major_follow_a_new_ratio(monkeypatch, tmp_path):
    with_ratio_16(monkeypatch)
    fields = json.loads((EXAMPLES / "flash.json").read_text())
    ratios = [16 if ratio == 4 else ratio for ratio in fields["compress_ratios"]]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields | {"compress_ratios": ratios}))
    for variant in (Variant(), Variant(draft_tokens=4, fp4_indexer=True, bf16_states=True)):
        geometry = read_model(str(path), variant).geometry
        assert {"c16_kv", "c16_state"} <= {figure.name for figure in family_figures(geometry)}
        assert geometry.rings[16] == (32 if variant.draft_tokens else 16)
        assert geometry.state_bytes[16] == (2 if variant.bf16_states else 4)
    assert not is_covered((0, 16))


def test_verify_mode_and_the_demos_judge_name_it(extend):
    world = extend()
    family = world.side.families[-1]
    request, copy = world.start(301, 1), world.memory.allocate(301, world.side.geometry)
    ReferenceCopier(world.side, lambda: ()).save(copy, world.request(request))
    spans = world.plan(request)
    verify.check_device(world.side, copy, spans)
    for buffer in world.side.buffers[family.name]:
        buffer.view(-1)[:] ^= 1
    with pytest.raises(VerifyMismatch, match=f"family {family.name}, layer {family.layers[0]}"):
        verify.check_device(world.side, copy, spans)
    world.pool.host = SimpleNamespace(buffers=world.side)
    assert unjudged(world.pool, parts(world.pool)) == [family.name]
    copy.release()


def test_a_pool_without_its_buffers_is_refused_by_name(monkeypatch, extend):
    world = extend()
    family = world.side.families[-1]
    getattr(world.pool, f"{family.name}_buffers").pop()
    with pytest.raises(LayoutRefused, match=rf"{family.name}: \d buffers for {len(family.layers)} layers"):
        describe.describe(world.pool)
    delattr(world.pool, f"{family.name}_buffers")
    with pytest.raises(LayoutRefused, match=f"{family.name}: the engine's pool has no buffers of it .*_buffers"):
        describe.describe(world.pool)
    monkeypatch.delitem(describe.BUFFERS, family.name)
    with pytest.raises(LayoutRefused, match=rf"{family.name}: pools/describe.py does not say where"):
        describe.describe(world.pool)


def test_a_pool_without_an_attribute_is_refused_by_its_name():
    pool = builders.served((0, 4, 128)).pool
    del pool.swa_page_size
    with pytest.raises(LayoutRefused, match="TokenToKVPool has no swa_page_size"):
        describe.describe(pool)


def test_a_family_without_layers_is_refused_by_name(monkeypatch):
    written = describe.families
    monkeypatch.setattr(describe, "families", lambda g: tuple(dataclasses.replace(f, layers=()) for f in written(g)))
    pool = builders.make_pool(PoolSpec((0, 128)))
    pool.swa_kv_pool.kv_buffer, pool.c128_kv_pool.kv_buffer, pool.compress_state_pools = [], [], []
    with pytest.raises(LayoutRefused, match="c128_kv: a family without layers"):
        describe.describe(pool)


def test_the_page_explains_every_field_and_what_can_be_written_in_it():
    explained = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert explained == [*table.Compression._fields, *(field.name for field in dataclasses.fields(Family))]
    assert all(f"`Group.{group.name}`" in PAGE for group in Group)


def test_every_family_has_a_line_of_buffers():
    for index in ("fp8", "fp4_split"):
        g = Geometry(
            (0, 1, 2, 4, 128), sources=(1, 2), index_rows=dict.fromkeys((1, 2, 4), index), draft=table.Draft(1, 127)
        )
        assert {family.name for family in table.families(g)} <= {*describe.BUFFERS, *describe.DRAFT_BUFFERS}


def test_no_other_module_knows_a_family_by_name():
    """The two files of the page, the demo's judge, and a default of the stress tool."""
    package, names = ROOT / "sglang_dsv4", {*describe.BUFFERS, *describe.DRAFT_BUFFERS}
    knowing = {
        str(path.relative_to(ROOT))
        for folder in (package, ROOT / "triton_ops")
        for path in folder.rglob("*.py")
        if names & {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
    }
    allowed = ("cache/families", "pools/describe", "testing/ledger", "cli/stress")
    assert knowing == {f"sglang_dsv4/{name}.py" for name in allowed}

"""``sglang-dsv4 plan``: figures against real pools, host memory and recorded runs; refusals; the picture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import builders
import oracle
import pytest
import torch

from sglang_dsv4.cache.families import Address, Group
from sglang_dsv4.cache.groups import init_groups
from sglang_dsv4.cache.packed import PackedBlock
from sglang_dsv4.cli import plan_drawing, plan_figures
from sglang_dsv4.cli.main import main
from sglang_dsv4.cli.plan_config import EXAMPLES, ConfigError, Variant, read_model
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem.memory import HostMemory
from sglang_dsv4.hostmem.sizing import PoolSize, block_counts
from sglang_dsv4.settings import read_settings

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (2, 127, 128, 129, 130, 256, 257, 513, 1025)
VARIANTS = {
    "plain": (Variant(), {}),
    "drafts": (Variant(draft_tokens=2), {"draft_tokens": 2}),
    "small": (Variant(fp4_indexer=True, bf16_states=True), {"fp4_indexer": True, "state_dtype": torch.bfloat16}),
}


@pytest.fixture
def config(tmp_path):
    """Writes the Flash example with some fields changed (None: left out); returns the path."""

    def write(**changes):
        fields = json.loads((EXAMPLES / "flash.json").read_text()) | changes
        path = tmp_path / "config.json"
        path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
        return str(path)

    return write


@pytest.fixture
def small(config):
    """The config of ``builders.SMALL_RATIOS``, with the entry of a draft layer behind them."""
    return config(num_hidden_layers=len(builders.SMALL_RATIOS), compress_ratios=[*builders.SMALL_RATIOS, 0])


@pytest.fixture
def planned(capsys):
    """Runs the command with --json; returns what it printed."""

    def run(*argv):
        assert main(["plan", *argv, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def buffer_bytes(pool):
    """Bytes of all buffers of the pool by family, without any layout of ours."""
    total = dict.fromkeys(oracle.FAMILIES, 0)
    for (family, _), buffer in oracle.buffers(pool).items():
        total[family] += buffer.nbytes
    return total


# ------------------------------------------------------------------------------------ against real pools


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_geometry_and_the_cost_of_a_page_and_a_slot_are_those_of_the_engines_pool(small, variant):
    flags, spec = VARIANTS[variant]
    geometry = read_model(small, flags).geometry
    figures = {f.name: f for f in plan_figures.family_figures(geometry)}
    sizes = {"pages": 9, "swa_pages": 5, "requests": 4}
    world = builders.served(**spec, **sizes)
    assert geometry == world.side.geometry
    before = buffer_bytes(world.pool)
    # Ten more of each: state rows are padded, so that one more could cost nothing.
    after = buffer_bytes(builders.served(**spec, **{name: count + 10 for name, count in sizes.items()}).pool)
    assert set(figures) == set(before)
    for name, figure in figures.items():
        assert after[name] - before[name] == 10 * figure.unit_bytes, name


def test_bytes_a_token_are_the_rows_that_the_pool_keeps(small):
    pool = builders.served().pool
    c4, c128 = (builders.SMALL_RATIOS.count(ratio) for ratio in (4, 128))
    wanted = {
        "c4_kv": c4 * pool.c4_kv_pool.get_bytes_per_token() / 4,
        "c4_indexer": c4 * pool.c4_indexer_kv_pool.get_bytes_per_token() / 4,
        "c128_kv": c128 * pool.c128_kv_pool.get_bytes_per_token() / 128,
    }
    pages = oracle.buffers(pool)
    for figure in plan_figures.family_figures(read_model(small, Variant()).geometry):
        assert figure.row_bytes_a_token == wanted.get(figure.name, 0)
        first = next(buffer for (family, _), buffer in pages.items() if family == figure.name)
        padded = figure.layers * first.shape[1] / 256 if figure.name in wanted else 0
        assert figure.page_bytes_a_token == padded >= figure.row_bytes_a_token


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_pool_of_the_planned_size_fits_the_budget_and_no_page_more_does(small, variant):
    flags, spec = VARIANTS[variant]
    geometry, budget, slots, ratio = read_model(small, flags).geometry, 24 << 20, 5, 0.3
    gpu = plan_figures.gpu_figures(geometry, budget, slots, ratio)
    pages, swa_pages = gpu.tokens // 256, gpu.swa_tokens // 256
    assert swa_pages == int(pages * ratio) > 0
    real = buffer_bytes(builders.served(**spec, pages=pages, swa_pages=swa_pages, requests=slots).pool)
    assert sum(real.values()) <= gpu.used_bytes <= budget
    more = plan_figures.device_bytes(geometry, pages + 1, int((pages + 1) * ratio), slots)
    assert sum(more.values()) > budget
    planned = plan_figures.device_bytes(geometry, pages, swa_pages, slots)
    figures = {f.name: f for f in plan_figures.family_figures(geometry)}
    for address in Address:  # not only the sum: a family that is forgotten must not hide behind another's spare pages
        assert planned[address] >= sum(real[f.name] for f in figures.values() if f.unit == address.value) > 0
    stride = {figure.name: figure.block_bytes for figure in plan_figures.group_figures(geometry)}
    assert gpu.auto_host_bytes == pages * stride["paged"] + slots * (stride["window"] + stride["request"])
    # What is set aside for spare pages is bounded: a page of window rows, a slot, and 256 rows of c4 and c128.
    spare = {"c4_kv": 4, "c4_indexer": 4, "c128_kv": 128}
    most = sum(figure.unit_bytes * spare.get(name, 1) for name, figure in figures.items())
    assert gpu.used_bytes - sum(real.values()) <= most


# ------------------------------------------------------------------- against host memory and real requests


@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_retract_moves_the_bytes_of_a_real_request(small, tokens):
    world, saved = builders.served(pages=9, swa_pages=9), tokens - 1
    request = world.start(saved, slot=2)
    rows = oracle.read(world.pool, request.slots, saved, request.req_slot)
    grows = ("c4_kv", "c4_indexer", "c128_kv")
    live = sum(len(data) for (family, _, _), data in rows.items() if family not in grows)
    pages = len({slot // 256 for slot in request.slots.tolist()})
    whole = sum(
        pages * buffer.shape[1] for (family, _), buffer in oracle.buffers(world.pool).items() if family in grows
    )
    figure = plan_figures.length_figures(read_model(small, Variant()).geometry, tokens, 1, 10, 1000)
    assert figure.moved_bytes == live + whole
    assert figure.move_ms == pytest.approx((live + whole) / 10e9 * 1e3)
    assert figure.recompute_ms == pytest.approx(saved)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("requests", [1, 3])
def test_the_settings_reserve_room_for_exactly_so_many_copies(small, tokens, requests):
    geometry = read_model(small, Variant()).geometry
    figure = plan_figures.length_figures(geometry, tokens, requests, 55, None)
    specs = init_groups(geometry)
    counts = block_counts(specs, PoolSize(1, 1), read_settings(figure.settings), ram=1 << 40)
    memory = HostMemory(specs, counts, pin=False)
    assert figure.host_bytes <= memory.arena.nbytes
    for group, region in zip(plan_figures.group_figures(geometry), memory.regions.values(), strict=True):
        assert group.block_bytes * region.blocks == region.nbytes
        assert group.grows is (region.spec.blocks_for(257) > region.spec.blocks_for(256))
    copies = [memory.allocate(tokens - 1, geometry) for _ in range(requests)]
    assert sum(copy.nbytes for copy in copies) == memory.held_bytes == figure.host_bytes
    assert sum(figure.host_bytes_by_group.values()) * requests == figure.host_bytes
    with pytest.raises(HostMemoryExhausted):
        memory.allocate(tokens - 1, geometry)
    assert figure.recompute_ms is None


# --------------------------------------------------------------------------- against what is written down


@pytest.mark.parametrize(("name", "argv", "model"), [
    ("transfer", [], "flash"),
    ("transfer-pro", ["--fp4-indexer", "--bf16-states"], "pro"),
])  # fmt: skip
def test_the_bytes_are_those_of_the_recorded_runs(planned, name, argv, model):
    rows = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())["rows"]
    recorded = {row["tokens"] + 1: row["bytes"] for row in rows if "bytes" in row}
    found = planned(model, *argv, "--tokens", *map(str, recorded))["requests"]
    assert recorded == {row["tokens"]: row["moved_bytes"] for row in found}


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(("changes", "named"), [
    ({"model_type": "llama"}, "model_type is 'llama'"),
    ({"model_type": "deepseek_v41"}, "model_type is 'deepseek_v41'"),
    ({"model_type": None}, "model_type is missing"),
    ({"compress_ratios": None}, "compress_ratios is missing"),
    ({"compress_ratios": 4}, "compress_ratios is 4"),
    ({"compress_ratios": [4, 128]}, "compress_ratios has 2 entries for num_hidden_layers 43"),
    ({"compress_ratios": [0] * 42 + [2]}, r"compress_ratios\[42\] is 2, covered: 0, 4, 128"),
    ({"compress_ratios": [False] * 43}, r"compress_ratios\[0\] is False"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"num_hidden_layers": "43"}, "num_hidden_layers is '43'"),
    ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    ({"num_key_value_heads": 8}, "num_key_value_heads is 8, covered: 1"),
    ({"head_dim": 128}, "head_dim is 128, covered: 512"),
    ({"qk_rope_head_dim": 32}, "qk_rope_head_dim is 32, covered: 64"),
    ({"index_head_dim": 64}, "index_head_dim is 64, covered: 128"),
    ({"sliding_window": 512}, "sliding_window is 512"),
    ({"sliding_window": 4}, "sliding_window is 4"),
    ({"sliding_window": None}, "sliding_window is missing"),
    ({"kv_source_layer_ids": [1]}, "kv_source_layer_ids is set"),
    ({"max_position_embeddings": "1M"}, "max_position_embeddings is '1M'"),
])  # fmt: skip
def test_a_foreign_config_is_refused_by_the_field(config, capsys, changes, named):
    path = config(**changes)
    with pytest.raises(ConfigError, match=named) as refusal:
        read_model(path, Variant())
    assert path in str(refusal.value)
    assert main(["plan", path]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert str(refusal.value) in printed.err


def test_entries_of_draft_layers_and_a_config_without_indexer_are_taken(config):
    assert read_model(config(num_hidden_layers=2, compress_ratios=[0, 128, 1]), Variant()).geometry.ratios == (0, 128)
    plain = config(num_hidden_layers=1, compress_ratios=[0], index_head_dim=None, max_position_embeddings=None)
    assert read_model(plain, Variant()).context is None
    assert main(["plan", plain, "--gpu-gb", "1", "--request-slots", "4"]) == 0


def test_a_byte_order_mark_does_not_matter(config):
    path = Path(config())
    wanted = read_model(str(path), Variant())
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert read_model(str(path), Variant()) == wanted


@pytest.mark.parametrize(
    "text", ["[]", "{", "\x00", '{"a": "\udc80"}', "[" * 200_000, f'{{"head_dim": {"1" * 5000}}}'],
    ids=["array", "cut off", "binary", "no utf-8", "nested", "digits"],
)  # fmt: skip
def test_a_file_that_is_no_config_is_refused_by_its_path(tmp_path, text):
    path = tmp_path / "model.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"model\.json"):
        read_model(str(path), Variant())
    with pytest.raises(ConfigError, match=r"missing\.json.*flash"):
        read_model(str(tmp_path / "missing.json"), Variant())


@pytest.mark.parametrize(("argv", "named"), [
    (["--gpu-gb", "0.5"], "--gpu-gb or lower --request-slots"),
    (["--tokens", "2000000"], "--tokens 2000000: max_position_embeddings"),
    (["--draft-tokens", "9"], "--draft-tokens 9"),
    *(([flag, text], flag) for flag, text in (
        ("--tokens", "1"), ("--tokens", "9" * 5000), ("--requests", "0"), ("--link-gbs", "0"), ("--link-gbs", "nan"),
        ("--link-gbs", "1e305"), ("--gpu-gb", "inf"), ("--gpu-gb", "1e300"), ("--swa-ratio", "1.5"),
        ("--prefill-tokens-per-second", "-1"), ("--request-slots", "x"),
    )),
])  # fmt: skip
def test_a_size_that_cannot_be_planned_is_refused_by_its_flag(capsys, argv, named):
    try:
        status = main(["plan", "flash", *argv])
    except SystemExit as error:  # argparse's own
        status = error.code
    assert status == 2
    assert named in capsys.readouterr().err


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("argv", [["plan", "flash"], ["plan", "flash", "--json"], ["serve", "--dry-run"]])
@pytest.mark.parametrize("output", [closed_pipe, lambda: os.open("/dev/full", os.O_WRONLY)], ids=["pipe", "full"])
def test_output_that_cannot_be_written_is_no_traceback(argv, output):
    """`sglang-dsv4 plan flash | head -c 10`, and a full disk."""
    writer = output()
    done = subprocess.run(
        [sys.executable, "-m", "sglang_dsv4.cli.main", *argv], stdout=writer, stderr=subprocess.PIPE, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    os.close(writer)
    assert done.returncode not in (0, 120)
    wanted = "" if output is closed_pipe else "sglang-dsv4: standard output: No space left on device\n"
    assert done.stderr == wanted


# -------------------------------------------------------------------------------------------------- output


def test_the_table_shows_the_figures_of_the_json(planned, capsys, monkeypatch):
    argv = ["pro", "--gpu-gb", "80", "--requests", "7", "--tokens", "65536", "--prefill-tokens-per-second", "10000"]
    found = planned(*argv)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", *argv]) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    for family in found["families"]:
        row = next(line for line in text.splitlines() if line.split()[:1] == [family["name"]])
        assert row.split()[1:3] == [family["group"], str(family["layers"])]
        if family["page_bytes_a_token"]:
            assert f" {family['page_bytes_a_token']:,.0f} B " in row
    (request,) = found["requests"]
    row = next(line for line in text.splitlines() if line.split()[:1] == ["65,536"])
    assert f"{request['moved_bytes'] / 1e6:.1f} MB" in row
    assert request["settings"]["DSV4_HOST_GB"] in row
    assert f"{request['recompute_ms'] / 1e3:.1f} s" in row
    assert "DSV4_HOST_COPIES=7" in text
    assert f"{found['gpu']['tokens']:,}" in text


# ------------------------------------------------------------------------------------------------- picture


def test_the_boxes_of_a_block_are_all_of_its_bytes_once():
    for spec in init_groups(read_model("flash", Variant()).geometry).values():
        packed = PackedBlock.of(spec)
        end, nbytes = 0, Counter()
        for box in sorted(plan_drawing.boxes(packed), key=lambda box: box.start):
            assert box.start == end
            end += box.nbytes
            nbytes[box.name] += box.nbytes
        assert end == packed.block_stride
        assert end - nbytes.pop("padding", 0) == sum(nbytes.values()) >= packed.payload_bytes
        assert set(nbytes) == {family.name for family in packed.families}


def test_the_boxes_of_a_request_are_its_copy():
    memory, geometry = builders.host_memory(blocks=8)
    copy = memory.allocate(1024, geometry)
    found = plan_drawing.request_boxes(geometry, 1025)
    assert [group for group, _, _ in found] == list(Group)
    ends = [0]
    for group, start, nbytes in found:
        assert start == ends[-1]
        assert nbytes == len(copy.blocks[group]) * memory.regions[group].packed.block_stride
        ends.append(start + nbytes)
    assert ends[-1] == copy.nbytes


def test_without_matplotlib_the_extra_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plan", "flash", "--svg", str(tmp_path / "flash.svg")]) == 2
    printed = capsys.readouterr()
    assert "sglang-dsv4[plots]" in printed.err
    assert not printed.out
    assert not list(tmp_path.iterdir())


def test_a_bitmap_comes_too(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    assert main(["plan", "pro", "--png", str(tmp_path / "pro.png"), "--json"]) == 0
    assert (tmp_path / "pro.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(capsys.readouterr().out)["model"]["name"] == "pro"

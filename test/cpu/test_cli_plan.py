"""``sglang-dsv4 plan``: figures against real pools, host memory and recorded runs; refusals; the tables."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import builders
import oracle
import pytest
import torch

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.units import Units
from sglang_dsv4.cli import plan_figures, plan_store
from sglang_dsv4.cli.main import main
from sglang_dsv4.cli.plan_config import EXAMPLES, ConfigError, Variant, read_model
from sglang_dsv4.cli.serve import parser, split
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem.memory import HostMemory
from sglang_dsv4.hostmem.sizing import PoolSize, arena_size, kept_pages
from sglang_dsv4.settings import read_settings
from sglang_dsv4.store.ring import Ring
from sglang_dsv4.store.seal import SEAL_BYTES
from sglang_dsv4.testing.standalone import TINY41_RATIOS, TINY41_SOURCES

LENGTHS = (2, 128, 130, 256, 257, 1025)
SHARED = {"ratios": TINY41_RATIOS, "sources": TINY41_SOURCES}
VARIANTS = {  # what the command is told, and the pool that is built so
    "plain": (Variant(), {}),
    "drafts": (Variant(draft_tokens=2), {"draft_tokens": 2}),
    "small": (Variant(fp4_indexer=True, bf16_states=True), {"fp4_indexer": True, "state_dtype": torch.bfloat16}),
}
VARIANTS |= {
    "v4 on v41 rows": (Variant(kv_layout="v41"), {"kv_layout": "v41"}),
    "v41": (Variant(), SHARED),
    "v41 drafts": (Variant(draft_tokens=6, bf16_states=True), {**SHARED, "draft_tokens": 6}),
    "v41 on v41 rows": (Variant(kv_layout="v41"), {**SHARED, "kv_layout": "v41"}),
    "v41 on new rows": (Variant(kv_layout="v41_new"), {**SHARED, "kv_layout": "v41_new"}),
}
variants = pytest.mark.parametrize(("flags", "spec"), VARIANTS.values(), ids=list(VARIANTS))


@pytest.fixture
def config(tmp_path):
    """Writes the Flash example with some fields changed (None: left out); returns the path."""

    def write(base=None, **changes):
        fields = (base or json.loads((EXAMPLES / "flash.json").read_text())) | changes
        path = tmp_path / "config.json"
        path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
        return str(path)

    return write


@pytest.fixture
def small(config):
    """The config of ``builders.SMALL_RATIOS``, with the entry of a draft layer behind them."""
    return config(num_hidden_layers=len(builders.SMALL_RATIOS), compress_ratios=[*builders.SMALL_RATIOS, 0])


@pytest.fixture
def of(config, small):
    """The config of a pool's ``spec``; V4.1's is nested, as released ones are."""

    def write(spec):
        if "sources" not in spec:
            return small
        fields = json.loads((EXAMPLES / "v41-flash.json").read_text())
        sizes = {"num_hidden_layers": len(TINY41_RATIOS), "compress_ratios": [*TINY41_RATIOS, 0, 0]}
        text = fields["text_config"] | sizes | {"kv_source_layer_ids": list(TINY41_SOURCES)}
        return config(fields, text_config=text)

    return write


@pytest.fixture
def planned(capsys):
    """Runs the command with --json; returns what it printed."""

    def run(*argv):
        assert main(["plan", *argv, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def buffer_bytes(pool):
    """Bytes of all buffers of the pool by family, without any layout of ours."""
    total = Counter()
    for (family, _), buffer in oracle.buffers(pool).items():
        total[family] += buffer.nbytes
    return total


def _pool(spec, **sizes):
    """A pool of ``spec``; where there are draft tokens, with the draft's beside it."""
    return builders.served(**spec, **sizes, draft=127 * ("draft_tokens" in spec)).pool


@variants
def test_the_geometry_and_the_cost_of_a_page_and_a_slot_are_those_of_the_engines_pool(of, flags, spec):
    geometry = read_model(of(spec), flags).geometry
    figures = {f.name: f for f in plan_figures.family_figures(geometry)}
    sizes = {"pages": 9, "swa_pages": 5, "requests": 4}
    world = builders.served(**spec, **sizes, draft=127 * ("draft_tokens" in spec))
    assert geometry == world.side.geometry
    before = buffer_bytes(world.pool)
    # Ten more of each: state rows are padded, so that one more could cost nothing.
    after = buffer_bytes(_pool(spec, **{name: count + 10 for name, count in sizes.items()}))
    assert set(figures) == set(before)
    for name, figure in figures.items():
        assert after[name] - before[name] == 10 * figure.unit_bytes, name
        assert figure.page_bytes_a_token == (figure.unit_bytes / 256 if figure.unit == "full page" else 0)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_retract_moves_the_bytes_of_a_real_request(small, tokens):
    world, saved = builders.served(pages=9, swa_pages=9), tokens - 1
    request = world.start(saved, slot=2)
    rows = oracle.read(world.pool, request.slots, saved, request.req_slot)
    live = sum(len(data) for (family, _, _), data in rows.items() if not oracle.grows(family))
    pages = len({slot // 256 for slot in request.slots.tolist()})
    buffers = oracle.buffers(world.pool).items()
    whole = sum(pages * buffer.shape[1] for (family, _), buffer in buffers if oracle.grows(family))
    figure = plan_figures.length_figures(read_model(small, Variant()).geometry, tokens, 1, 10)
    assert figure.moved_bytes == live + whole
    assert figure.move_ms == pytest.approx((live + whole) / 10e9 * 1e3)


FLASH_PAGE, FLASH_LEAST = 999_424, 17  # bytes of a unit of Flash without drafts, and a page and the longest tail
FLASH_ROWS = {"swa_kv": 43, "c4_state": 21, "c4_indexer_state": 21, "c128_state": 20}  # layers


def flash_units(tokens):
    """Counts the units of a copy of Flash by hand."""
    tail = 0
    for family, layers in FLASH_ROWS.items():
        rows = len(oracle.positions(family, tokens))
        tail += -(-rows * sum(oracle.FAMILIES[family].planes) * layers // 256) * 256
    return -(-tokens // 256) - -tail // FLASH_PAGE


def reserved(settings, less=0.0):
    """Counts the units of Flash that a server reserves with ``settings`` and ``less`` GiB; 0 where it refuses."""
    units, settings = Units.of(read_model("flash", Variant()).geometry), read_settings(settings)
    try:
        settings = replace(settings, host_gb=round(settings.host_gb - less, 2))
        return arena_size(units, PoolSize(1, 1), settings, ram=1 << 60).count
    except HostMemoryExhausted:
        return 0


@pytest.mark.parametrize("tokens", [2, 128, 257, 2048, 4096, 65536])
@pytest.mark.parametrize("requests", [1, 3, 16, 238])
def test_the_settings_say_the_least_hundredths_that_hold_the_copies(tokens, requests):
    figure = plan_figures.length_figures(read_model("flash", Variant()).geometry, tokens, requests, 55)
    wanted = max(requests * flash_units(tokens - 1), FLASH_LEAST)
    assert figure.host_bytes == wanted * FLASH_PAGE
    assert reserved(figure.settings, less=0.01) < wanted <= reserved(figure.settings)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("requests", [1, 3])
def test_so_many_copies_find_room_and_hold_the_bytes_that_it_says(small, tokens, requests):
    geometry = read_model(small, Variant()).geometry
    units, figure = Units.of(geometry), plan_figures.length_figures(geometry, tokens, requests, 55)
    size = arena_size(units, PoolSize(1, 1), read_settings(figure.settings), ram=1 << 40)
    memory = HostMemory(families(geometry), size, pin=False)
    copies = [memory.allocate(tokens - 1, geometry) for _ in range(requests)]
    assert sum(copy.nbytes for copy in copies) == memory.held_bytes
    assert figure.host_bytes == max(memory.held_bytes, units.least * units.nbytes) <= memory.arena.nbytes


@pytest.mark.parametrize("requests", [1, 3])
def test_choices_are_counted_beside_the_cache(small, requests):
    geometry, row = read_model(small, Variant()).geometry, 1_032
    units, figure = Units.of(geometry, row), plan_figures.length_figures(geometry, 1025, requests, 55, row_bytes=row)
    plain = plan_figures.length_figures(geometry, 1025, requests, 55)
    assert figure.moved_bytes == plain.moved_bytes and figure.host_bytes > plain.host_bytes
    size = arena_size(units, PoolSize(1, 1), read_settings(figure.settings), ram=1 << 40)
    memory = HostMemory(families(geometry), size, pin=False)
    copies = [memory.allocate(1024, geometry) for _ in range(requests)]
    assert figure.host_bytes == max(memory.held_bytes, units.least * units.cost) <= memory.arena.nbytes
    assert all(memory.host_rows[unit].numel() == 256 * row for copy in copies for unit in copy.units)


@pytest.mark.parametrize(("model", "index"), [("flash", (21, 43_008)), ("pro", (30, 122_880)), ("v41-flash", None)])
def test_it_says_what_choices_cost_a_token_and_layer(capsys, model, index):
    """The engine knows no indexer of V4.1 that it could record."""
    words = ["plan", model, "--tokens", "65536", "--enable-return-routed-experts"]
    assert main(words) == 0
    said = capsys.readouterr().out
    layers = {"flash": 43, "pro": 61, "v41-flash": 40}[model]
    row = f"--enable-return-routed-experts {layers} 24 B {layers * 24:,} B"
    assert row in [" ".join(line.split()) for line in said.splitlines()]
    assert said.rstrip().endswith("--enable-return-routed-experts"), "the command of the server"
    status = main([*words, "--enable-return-indexer-topk", "--json"])
    said = capsys.readouterr()
    if index is None:
        assert (status, "--enable-return-indexer-topk: the config of" in said.err) == (2, True)
    else:
        found = json.loads(said.out)["choices"][1]
        assert (found["layers"], found["token_bytes"]) == index


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tokens", [300, 4097, 65536])
def test_ranks_save_at_once_what_the_busiest_of_them_has(tokens, ranks):
    geometry = read_model("flash", Variant()).geometry
    alone, together = (plan_figures.length_figures(geometry, tokens, 1, 10, n) for n in (1, ranks))
    assert alone.save_ms == pytest.approx(alone.move_ms) == pytest.approx(together.move_ms)
    assert together.host_bytes == alone.host_bytes, "once for all of them"
    pages, count = -(-(tokens - 1) // 256), flash_units(tokens - 1)
    paged = sum(f.moved_bytes(geometry.page_size, tokens - 1) for f in families(geometry) if f.whole_pages)
    tail = alone.moved_bytes - paged
    moved = [paged / pages] * pages  # by unit
    moved += [min(FLASH_PAGE, tail - at) for at in range(0, tail, FLASH_PAGE)]
    assert len(moved) == count
    edges = [count * rank // ranks for rank in range(ranks + 1)]
    most = max(sum(moved[first:end]) for first, end in pairwise(edges))
    assert together.save_ms == pytest.approx(most / 10e9 * 1e3)
    assert alone.save_ms / ranks <= together.save_ms + 1e-9 < alone.save_ms


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize(("requests", "ranks"), [(1, 1), (3, 1), (3, 4)])
def test_with_hisparse_they_reserve_room_for_the_copies_and_the_kept_rows(small, tokens, requests, ranks):
    geometry = read_model(small, Variant(hisparse=True)).geometry
    figure = plan_figures.length_figures(geometry, tokens, requests, 55, ranks)
    settings, units = read_settings(figure.settings), Units.of(geometry)
    page = sum(64 * 584 // 576 * 576 + 576 for ratio in geometry.ratios if ratio == 4)  # of one rank
    pages = requests * -(-(tokens - 1) // 256)
    kept = kept_pages(settings, 1 << 20, page, units.nbytes, 1 << 40, ranks)
    assert kept >= pages and figure.kept_bytes == pages * page * ranks
    left = replace(settings, host_gb=settings.host_gb - kept * page * ranks / 2**30)
    memory = HostMemory(families(geometry), arena_size(units, PoolSize(1, 1), left, ram=1 << 40), pin=False)
    assert len([memory.allocate(tokens - 1, geometry) for _ in range(requests)]) == requests


@pytest.mark.parametrize(("layout", "paged", "row"), [("v4", 417_920, 584), ("v41", 227_840, 528)])
def test_v41_flash_costs_what_was_counted_by_hand(planned, layout, paged, row):
    """One c1 and three c2 sources, their keys in fp4; 127 rows of 40 layers; three rows that pend."""
    found = planned(
        "v41-flash", "--draft-tokens", "0", "--kv-layout", layout, "--tokens", "131074"
    )  # 131,073 saved: an odd one pends
    assert {group["name"]: group["payload_bytes"] for group in found["groups"]} == {
        "paged": paged, "window": 127 * 40 * row, "request": 3 * 4096,
    }  # fmt: skip
    (request,) = found["requests"]
    assert request["moved_bytes"] == 513 * paged + 127 * 40 * row + 3 * 4096


@pytest.mark.parametrize("tokens", [4096, 65536, 65791, 262144])
def test_a_session_costs_its_pages_and_a_window_a_point(planned, tokens):
    found = planned("flash", "--draft-tokens", "0", "--sessions", "--tokens", str(tokens))
    (session,) = found["sessions"]
    pages = tokens // 256
    assert flash_units(256) == 1 + 5
    for name, units in {"first": pages + 5, "point": 5, "turn": 10 + 5}.items():
        assert session[f"{name}_bytes"] == units * FLASH_PAGE, name
    assert session["a_gib"] == pytest.approx(2**30 / ((pages + 2 * 5) * FLASH_PAGE))


@pytest.mark.parametrize("tokens", [256, 4096, 65536, 65791])
@pytest.mark.parametrize(("sessions", "requests"), [(1, 1), (64, 16), (1000, 3)])
def test_the_settings_say_the_least_hundredths_that_hold_sessions_and_copies(tokens, sessions, requests):
    figure = plan_figures.session_figures(read_model("flash", Variant()).geometry, tokens, sessions, requests)
    assert read_settings(figure.settings).sessions.kept
    wanted = sessions * (tokens // 256 + 2 * 5) + requests * flash_units(tokens - 1)
    assert reserved(figure.settings, less=0.01) < wanted <= reserved(figure.settings)


def test_the_settings_for_sessions_are_never_refused():
    """One of 256 tokens holds fewer units than the longest tail, without which no server starts."""
    geometry = Geometry((4,) * 30 + (128,) * 27)
    figure = plan_figures.session_figures(geometry, 257, sessions=1, requests=1)
    assert arena_size(Units.of(geometry), PoolSize(1, 1), read_settings(figure.settings), ram=1 << 60).count >= 16


def test_the_command_to_paste_has_room_for_sessions(planned, capsys):
    argv = ["flash", "--tokens", "4096", "65536", "--sessions", "7", "--requests", "3"]
    found = planned(*argv)
    host_gb = found["sessions"][1]["settings"]["DSV4_HOST_GB"]
    assert float(host_gb) > float(found["requests"][1]["settings"]["DSV4_HOST_GB"])
    wanted = f"sglang-dsv4 serve --dsv4-host-gb {host_gb} --model-path MODEL"
    assert found["command"] == f"{wanted} --tp 1"
    assert main(["plan", *argv]) == 0
    text = capsys.readouterr().out
    assert found["command"] in text.splitlines() and "7 sessions of 65,536 tokens" in text
    (row,) = (line for line in text.splitlines() if line.split()[:1] == ["65,536"] and line.split()[-1] == host_gb)
    assert f"{found['sessions'][1]['first_bytes'] / 2**20:.1f} MiB" in row
    assert planned(*argv[:4])["sessions"] == []


def test_the_objects_of_a_plan_are_as_long_as_those_of_a_store():
    for nbytes in (FLASH_PAGE, 417_920, 4096, 4096 - SEAL_BYTES):
        assert plan_store.object_bytes(nbytes) == Ring(nbytes, 1).stride
    assert plan_store.SEAL_BYTES == SEAL_BYTES


@pytest.mark.parametrize("tokens", [256, 4096, 65536, 65791])
def test_a_session_in_a_store_costs_its_pages_and_a_window(planned, tokens):
    argv = ["flash", "--draft-tokens", "0", "--tokens", str(tokens), "--store", "1000", "--store-rate", "2"]
    found = planned(*argv)
    (stored,), one = found["store"], -(-(FLASH_PAGE + 112) // 4096) * 4096
    assert stored["objects"] == tokens // 256 + 5 and stored["nbytes"] == stored["objects"] * one
    assert stored["total_bytes"] == 1000 * stored["nbytes"] and stored["turn_bytes"] == 15 * one
    assert stored["ms"] == pytest.approx(stored["nbytes"] / 2e6)
    assert stored["turn_ms"] == pytest.approx(stored["turn_bytes"] / 2e6)
    assert found["sessions"] == [] and found["store_gbs"] == 2


def test_the_table_of_a_store_and_its_command(capsys, planned):
    assert main(["plan", "flash", "--tokens", "4096", "65536", "--store", "--store-rate", "5"]) == 0
    text = capsys.readouterr().out
    assert "Sessions in a store, at 5 GB/s (--store-rate)" in text and "64 sessions" in text
    (row,) = (line.split() for line in text.splitlines() if line.split()[:1] == ["65,536"] and " 261 " in line)
    assert row[:4] == ["65,536", "249.8", "MiB", "261"] and "52.4 ms" in " ".join(row)
    (command,) = (line for line in text.splitlines() if line.startswith("sglang-dsv4 serve"))
    ours, _ = split(shlex.split(command)[2:])
    assert read_settings({"DSV4_STORE": parser().parse_args(ours).store}).store.folder == "/FOLDER"
    assert planned("flash")["store"] == []


V41 = {"model_type": "deepseek_v41", "num_hidden_layers": 5, "compress_ratios": [0, 0, 2, 1, 1]}


@pytest.mark.parametrize(("changes", "named"), [
    ({"model_type": "llama"}, "model_type is 'llama'"),
    ({"compress_ratios": [4, 128]}, "compress_ratios has 2 entries for num_hidden_layers 43"),
    ({"compress_ratios": [0] * 42 + [2]}, r"compress_ratios\[42\] is 2, covered: 0, 4, 128"),
    ({"num_hidden_layers": "43"}, "num_hidden_layers is '43'"),
    ({"num_key_value_heads": 8}, "num_key_value_heads is 8, covered: 1"),
    ({"index_head_dim": 64}, "index_head_dim is 64, covered: 128"),
    ({"sliding_window": 512}, "sliding_window is 512"),
    ({"text_config": {"head_dim": 64}, "head_dim": 512, "window": 1, "sliding_window": 4}, "sliding_window is 4"),
    ({"model_type": "deepseek_v41"}, r"compress_ratios\[2\] is 4, covered: 0, 1, 2"),
    ({**V41, "kv_source_layer_ids": [2]}, "kv_source_layer_ids has no layer of ratio 1 for layer 3 to read"),
    ({**V41, "kv_source_layer_ids": [2, 3, 9]}, "kv_source_layer_ids has 9, which is no layer of a shared ratio"),
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


def test_what_real_configs_have_besides_is_taken(config):
    assert read_model(config(num_hidden_layers=2, compress_ratios=[0, 128, 1]), Variant()).geometry.ratios == (0, 128)
    plain = config(num_hidden_layers=1, compress_ratios=[0], index_head_dim=None, max_position_embeddings=None)
    assert read_model(plain, Variant()).context is None
    assert main(["plan", plain]) == 0
    path = Path(config())  # with a byte order mark
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
    (["--tokens", "2000000"], "--tokens 2000000: max_position_embeddings"),
    (["--draft-tokens", "9"], "--draft-tokens 9"),
    (["--hisparse", "--draft-tokens", "2"], "--hisparse"), (["--sessions", "--hisparse"], "--hisparse"),
    (["--sessions", "--tokens", "255"], "--tokens 255 with --sessions: needed: at least a page, 256"),
    (["no history", "--sessions"], "--sessions"), (["no history", "--store"], "--store: no layer of"),
    (["--store", "--hisparse"], "--store with --hisparse"), (["--store", "0"], "--store"),
    (["--store", "--tokens", "255"], "--tokens 255 with --store: needed: at least a page, 256"),
    (["--store-rate", "0"], "--store-rate"),
    *(([flag, text], flag) for flag, text in (("--sessions", "0"), ("--tokens", "1"), ("--tokens", "9" * 5000),
     ("--requests", "0"), ("--link-gbs", "0"), ("--link-gbs", "nan"), ("--link-gbs", "1e305"))),
])  # fmt: skip
def test_what_cannot_be_planned_is_refused_by_its_flag(config, capsys, argv, named):
    at = ["flash"] if argv[0] != "no history" else [config(num_hidden_layers=1, compress_ratios=[0])]
    try:
        status = main(["plan", *at, *argv[argv[0] == "no history" :]])
    except SystemExit as error:  # argparse's own
        status = error.code
    assert status == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(("layers", "argv", "drafts"), [
    (1, [], 2), (3, [], 4), (0, [], 0), (None, [], 0), (1, ["--draft-tokens", "0"], 0), (0, ["--draft-tokens", "3"], 3),
    (1, ["--hisparse"], 0),
])  # fmt: skip
def test_drafts_are_those_of_the_config_unless_an_option_says_otherwise(planned, config, layers, argv, drafts):
    found = planned(config(num_nextn_predict_layers=layers), *argv)
    assert found["model"]["draft_tokens"] == drafts
    assert ("draft_swa_kv" in {family["name"] for family in found["families"]}) is (drafts > 0)


def test_the_command_to_paste_reserves_what_the_longest_request_needs(planned, config, capsys):
    path = config()
    argv = [path, "--tokens", "4096", "65536", "--requests", "7", "--ranks", "8"]
    found = planned(*argv)
    host_gb = found["requests"][1]["settings"]["DSV4_HOST_GB"]
    wanted = f"sglang-dsv4 serve --dsv4-host-gb {host_gb} --model-path {Path(path).parent} --tp 8"
    assert found["command"] == wanted
    assert main(["plan", *argv]) == 0
    text = capsys.readouterr().out
    assert wanted in text.splitlines(), "in one line"
    row = next(line for line in text.splitlines() if line.split()[:1] == ["65,536"])
    assert f"{found['requests'][1]['moved_bytes'] / 2**20:.1f} MiB" in row and host_gb in row
    assert "DSV4_HOST_COPIES" not in text
    ours, engine = split(shlex.split(wanted)[2:])
    assert parser().parse_args(ours).host_gb == host_gb
    assert engine == ["--model-path", str(Path(path).parent), "--tp", "8"]

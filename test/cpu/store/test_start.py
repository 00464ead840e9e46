"""A store that cannot be used stops the start with what to change; its identity tells models and layouts apart."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from played_store import Played
from sglang.srt.arg_groups.lora_hook import check_lora_server_args
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.units import Units
from sglang_dsv4.engine import store_start
from sglang_dsv4.engine.plain import start
from sglang_dsv4.engine.plain.serving import plain_of
from sglang_dsv4.errors import SettingError
from sglang_dsv4.settings import Settings, Store, read_settings
from sglang_dsv4.store import identity, keys
from sglang_dsv4.store.backend import FOLDER
from sglang_dsv4.store.client import State
from sglang_dsv4.testing.standalone import boot
from sglang_dsv4.testing.world import PlainWorld

RATIOS = (0, 4, 128)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("DSV4_STORE", "relative/folder", "absolute folder"),
        ("DSV4_STORE", "no such backend!", "absolute folder"),
        ("DSV4_STORE_CONFIG", "{", "must be JSON"),
        ("DSV4_STORE_CONFIG", "[1]", "JSON object"),
        ("DSV4_STORE_CONFIG", "@/no/such/file", "cannot be read"),
        ("DSV4_STORE_SECRET", "in the environment", "must be @FILE"),
    ],
)
def test_settings_that_cannot_be_read(name: str, value: str, said: str) -> None:
    with pytest.raises(SettingError, match=f"{name}.*{said}"):
        read_settings({name: value})


def test_a_short_secret_is_refused(tmp_path) -> None:
    (tmp_path / "secret").write_text("short\n")
    with pytest.raises(SettingError, match="at least 16 bytes"):
        read_settings({"DSV4_STORE_SECRET": f"@{tmp_path / 'secret'}"})
    (tmp_path / "secret").write_text("long enough for a key\n")
    settings = read_settings({"DSV4_STORE_SECRET": f"@{tmp_path / 'secret'}"})
    assert settings.store_secret == b"long enough for a key" and "long enough" not in repr(settings)


def settings(backend: str = "file", folder: str = "", **config: object) -> Settings:
    return Settings(store=Store(backend, folder), store_config=config)


def test_a_folder_is_made_for_its_owner_alone(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "made" / "here"
    config = store_start.config_of(settings(folder=str(folder)))
    assert folder.stat().st_mode & 0o777 == 0o700 and config["file_storage_path"] == str(folder)
    assert 0 < int(config["min_free_space"]) <= store_start.LEAST_FREE
    assert not caplog.records
    store_start.tell_of_others(settings(folder=str(folder)), config)
    assert not caplog.records
    folder.chmod(0o750)
    store_start.tell_of_others(settings(folder=str(folder)), config)
    assert "others may read or write" in caplog.text


def test_the_folder_of_the_engine_s_variable_is_looked_at(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "first"))
    config = store_start.config_of(settings(file_storage_path=str(tmp_path / "second")))
    assert store_start.folder_of(config) == str(tmp_path / "first")
    assert (tmp_path / "first").stat().st_mode & 0o777 == 0o700 and not (tmp_path / "second").exists()
    (tmp_path / "first").chmod(0o777)
    store_start.tell_of_others(settings(), config)
    assert "others may read or write" in caplog.text


@pytest.mark.parametrize("secret", [b"", b"a secret of some bytes"])
def test_a_master_at_a_public_address_is_told(secret, tmp_path, monkeypatch, caplog) -> None:
    """Wherever the engine's class takes it from: the configuration, its file, its variable."""
    monkeypatch.delenv(store_start.MASTER, raising=False)
    monkeypatch.delenv(store_start.MASTERS_FILE, raising=False)

    def told(address: str | None = None) -> list[str]:
        given = {} if address is None else {"master_server_address": address}
        config = store_start.config_of(found := replace(settings("mooncake", **given), store_secret=secret))
        caplog.clear()
        store_start.tell_of_others(found, config)
        return [record.args[0] for record in caplog.records]

    for address in ("127.0.0.1:50051", "localhost:50051", "LOCALHOST", "[::1]:50051", "10.0.0.1:1", "a.b.invalid:1"):
        assert not told(address)
    assert told("8.8.8.8:50051") == ["8.8.8.8:50051"] and "who reaches 8.8.8.8:50051 may read or" in caplog.text
    assert told("[2600::1]:50051") == ["[2600::1]:50051"] and not told()
    monkeypatch.setenv(store_start.MASTER, "8.8.4.4:1")
    assert told() == ["8.8.4.4:1"] and not told("10.0.0.1:1")
    file = tmp_path / "mooncake.json"
    monkeypatch.setenv(store_start.MASTERS_FILE, str(file))
    assert not told(), "the backend says that there is no such file"
    file.write_text('{"master_server_address": "8.8.8.8:2"}')
    assert told() == ["8.8.8.8:2"]


def test_a_start_that_failed_says_why(caplog, monkeypatch) -> None:
    """An import that fails closes the socket some milliseconds before its process has a status."""
    played = Played()

    def sleep(seconds: float) -> None:
        played.clock.now += seconds
        if played.client.state is State.STARTING:
            played.life.ours.close()
        else:
            played.life.child.status = 3

    monkeypatch.setattr(store_start, "time", SimpleNamespace(sleep=sleep, monotonic=played.clock))
    store_start._wait_until_up(played.client)
    assert "it does not start, and is tried again while the server runs: the store's process ended with status 3" in (
        caplog.text
    )


def test_what_stops_the_start(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="DSV4_STORE=shm: it keeps nothing"):
        store_start.config_of(settings("shm"))
    with pytest.raises(SettingError, match="needs a folder"):
        store_start.config_of(settings())
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match="cannot be made"):
        store_start.config_of(settings(folder=str(tmp_path / "file" / "below")))
    with pytest.raises(SettingError, match="must be seconds"):
        store_start._patience({"prefetch_timeout_base": "soon"})
    for seconds in (float("nan"), float("inf"), -1):
        with pytest.raises(SettingError, match="must be seconds, and are"):
            store_start._patience({"prefetch_timeout_per_ki_token": seconds})
    assert store_start._patience({"prefetch_timeout_base": 2}).seconds(2048) == 2 + 2 * store_start.PER_KI_TOKEN
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with pytest.raises(SettingError, match=f"{FOLDER}.*unset one of them"):
        store_start.config_of(settings(folder=str(tmp_path / "other")))
    monkeypatch.delenv(FOLDER)
    monkeypatch.setattr(store_start, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match="needs xxhash and blake3: pip install xxhash blake3"):
        store_start.config_of(replace(settings(folder=str(tmp_path)), store_secret=b"a secret of some bytes"))


@pytest.mark.parametrize("mode", DisaggregationMode)
def test_a_store_beside_an_external_linker_is_refused_by_name(mode: DisaggregationMode, tmp_path, monkeypatch, caplog):
    """Of a decode server by what the linker needs; the engine refuses the linker without it."""
    world = PlainWorld(ratios=RATIOS)  # the linker itself needs a service
    vars(world.scheduler).update(disaggregation_mode=mode)
    boot(enable_unified_cache_external_linker=True)
    monkeypatch.setenv("DSV4_STORE", str(tmp_path / "objects"))
    monkeypatch.setenv("DSV4_SESSIONS", "auto")
    monkeypatch.setattr(store_start, "join_store", lambda *_: pytest.fail("it joins a store"))
    start.start_plain_serving(None, world.scheduler)
    decodes = mode == DisaggregationMode.DECODE
    reason = "--disaggregation-decode-enable-radix-cache" if decodes else "an external cache linker"
    assert f"store: nothing is written or read: {reason}" in caplog.messages
    assert plain_of(world.allocator) is None and not (tmp_path / "objects").exists()


def test_a_models_digest_changes_with_its_configuration_and_weights(tmp_path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    with pytest.raises(SettingError, match="DSV4_STORE_MODEL"):
        identity.model_digest(str(model))
    weights = model / "model-00001.safetensors"
    (model / "config.json").write_text("{}")
    weights.write_bytes(os.urandom(3 << 20))
    (model / "model.safetensors.index.json").write_text("{}")
    known = {identity.model_digest(str(model))}

    def is_new() -> bool:
        found = identity.model_digest(str(model))
        was, _ = found in known, known.add(found)
        return not was

    assert not is_new()
    last = weights.read_bytes()[-1]
    with weights.open("r+b") as file:  # of the same size
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    assert is_new()
    weights.rename(model / "model-00002.safetensors")
    assert is_new()
    (model / "config.json").write_text('{"a": 1}')
    assert is_new()
    (model / "model.safetensors.index.json").write_text('{"a": 1}')
    assert is_new()


def said(geometry: Geometry) -> str:
    units = Units.of(geometry)
    return json.dumps(identity.layout(families(geometry), geometry.page_size, units.nbytes), default=str)


def test_ring_sizes_are_not_of_the_layout_and_rows_are() -> None:
    """A server with drafts has longer rings, and the same packed bytes."""
    plain = said(Geometry(RATIOS))
    assert plain == said(Geometry(RATIOS, rings={4: 16, 128: 256}))
    others = {
        said(Geometry((0, 4, 4, 128))), said(Geometry(RATIOS, first_layer=3)), said(Geometry(RATIOS, window=256)),
        said(Geometry(RATIOS, index_rows={4: "fp4"})), said(Geometry(RATIOS, state_bytes={4: 2})), plain,
    }  # fmt: skip
    assert len(others) == 6


class Server:
    """Holds all from which a server's identity is read; its files lie in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, config in (("model", "config"), ("draft", "config"), ("adapter", "adapter_config")):
            (folder / name).mkdir(parents=True)
            (folder / name / f"{config}.json").write_text("{}")
            (folder / name / "weights.safetensors").write_bytes(name.encode() * 1000)
        self.args = SimpleNamespace(
            model_path=str(folder / "model"), revision=None, json_model_override_args="{}", load_format="auto",
            quantization=None, dtype="auto", speculative_draft_model_path=str(folder / "draft"),
            speculative_draft_model_revision=None, speculative_draft_load_format=None,
            speculative_draft_model_quantization=None,
        )  # fmt: skip
        self.geometry, self.dtype, self.version = Geometry(RATIOS), torch.float8_e4m3fn, "0.5.23"
        self.settings, self.adapters, self.found = Settings(), [self.adapter()], None

    def adapter(self, name: str = "one") -> LoRARef:
        return LoRARef(lora_name=name, lora_path=str(self.folder / "adapter"))

    def set(self, **args: object) -> None:
        assert all(hasattr(get_context().server_args, name) for name in args), "the engine has these arguments"
        vars(self.args).update(args)

    def write(self, file: str, text: str) -> None:
        (self.folder / file).write_text(text)

    def key(self, monkeypatch: pytest.MonkeyPatch) -> bytes:
        """Returns the key before the first page of a tenant: those of all its objects follow from it."""
        monkeypatch.setattr(store_start, "engine_version", lambda: self.version)
        boot(lora_paths=self.adapters, speculative_draft_model_path=self.found)
        memory = SimpleNamespace(families=families(self.geometry), units=Units.of(self.geometry))
        host = SimpleNamespace(buffers=SimpleNamespace(geometry=self.geometry), memory=memory)
        pool, scheduler = SimpleNamespace(host=host, dtype=self.dtype), SimpleNamespace(server_args=self.args)
        return keys.root(keys.hasher(None), store_start._identity(self.settings, pool, scheduler), ("tenant", None))


def differ(one: object, **values: object) -> None:
    vars(one).update(values)


PARTS: dict[str, Callable[[Server], None]] = {
    "layout": lambda one: differ(one, geometry=Geometry(RATIOS, index_rows={4: "fp4"})),
    "kv dtype": lambda one: differ(one, dtype=torch.float8_e5m2),
    "engine": lambda one: differ(one, version="0.6.23"),
    "model": lambda one: one.write("model/weights.safetensors", "medal" * 1000),
    "name of the model": lambda one: differ(one, settings=Settings(store_model="a name")),
    "overrides": lambda one: one.set(json_model_override_args='{"index_topk": 256}'),
    "load format": lambda one: one.set(load_format="dummy"),
    "quantization": lambda one: one.set(quantization="fp8"),
    "dtype": lambda one: one.set(dtype="float16"),
    "no draft": lambda one: one.set(speculative_draft_model_path=None),
    "draft": lambda one: one.write("draft/weights.safetensors", "drift" * 1000),
    "draft's configuration": lambda one: one.write("draft/config.json", '{"a": 1}'),
    "draft's load format": lambda one: one.set(speculative_draft_load_format="dummy"),
    "draft's quantization": lambda one: one.set(speculative_draft_model_quantization="unquant"),
    "no adapter": lambda one: differ(one, adapters=[]),
    "two adapters": lambda one: differ(one, adapters=[one.adapter(), one.adapter("two")]),
    "adapter of the same name": lambda one: one.write("adapter/weights.safetensors", "adopter" * 1000),
    "adapter's configuration": lambda one: one.write("adapter/adapter_config.json", '{"r": 8}'),
    "adapter's name": lambda one: differ(one, adapters=[one.adapter("another")]),
}
NO_PARTS: dict[str, Callable[[Server], None]] = {
    "places of the files": lambda one: None,
    "the engine's patches": lambda one: differ(one, version="0.5.22.post1"),
    "ring sizes": lambda one: differ(one, geometry=Geometry(RATIOS, rings={4: 16, 128: 256})),
}


@pytest.mark.parametrize("part", PARTS)
def test_servers_that_differ_in_one_part_share_no_key(tmp_path: Path, monkeypatch, part: str) -> None:
    one, other = Server(tmp_path / "one"), Server(tmp_path / "other")
    assert one.key(monkeypatch) == other.key(monkeypatch), "nothing else sets them apart"
    PARTS[part](other)
    assert one.key(monkeypatch) != other.key(monkeypatch)
    PARTS[part](one)
    assert one.key(monkeypatch) == other.key(monkeypatch), "it does not differ from itself"


@pytest.mark.parametrize("part", NO_PARTS)
def test_servers_whose_bytes_are_the_same_share_keys(tmp_path: Path, monkeypatch, part: str) -> None:
    one, other = Server(tmp_path / "one"), Server(tmp_path / "other")
    NO_PARTS[part](other)
    assert one.key(monkeypatch) == other.key(monkeypatch)


def test_a_draft_that_the_engine_finds_below_the_model_is_told(tmp_path: Path, monkeypatch) -> None:
    """DSpark's, which no argument names. What is found in the model itself is told with it."""
    one, other = Server(tmp_path / "one"), Server(tmp_path / "other")
    for server in (one, other):
        server.set(speculative_draft_model_path=None)
    without = one.key(monkeypatch)
    other.found = str(other.folder / "model")
    assert other.key(monkeypatch) == without
    one.found, other.found = str(one.folder / "draft"), str(other.folder / "draft")
    assert one.key(monkeypatch) == other.key(monkeypatch) != without
    PARTS["draft"](other)
    assert one.key(monkeypatch) != other.key(monkeypatch)


def test_adapters_of_a_command_line_are_told(tmp_path: Path, monkeypatch) -> None:
    """The engine's record keeps the words; what it made of them is published apart."""
    one, other = Server(tmp_path / "one"), Server(tmp_path / "other")
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    words = ["--model-path", str(one.folder / "model"), "--speculative-draft-model-path", str(one.folder / "draft")]
    words += ["--json-model-override-args", "{}", "--lora-paths", f"one={one.folder / 'adapter'}"]
    one.args = ServerArgs.from_cli_args(parser.parse_args(words))
    check_lora_server_args(one.args)
    one.adapters = resolving_view(one.args).lora_paths
    assert one.key(monkeypatch) == other.key(monkeypatch)
    PARTS["adapter of the same name"](one)
    assert one.key(monkeypatch) != other.key(monkeypatch)


def test_the_name_of_a_model_replaces_what_its_files_say(tmp_path: Path, monkeypatch) -> None:
    """Of the draft, too; an adapter is told by its files all the same."""
    one, other = Server(tmp_path / "one"), Server(tmp_path / "other")
    for server in (one, other):
        server.settings = Settings(store_model="a name")
    PARTS["model"](other)
    PARTS["draft"](other)
    assert one.key(monkeypatch) == other.key(monkeypatch)
    PARTS["adapter of the same name"](other)
    assert one.key(monkeypatch) != other.key(monkeypatch)


def test_models_of_the_hub_are_told_by_the_files_of_their_revisions(tmp_path: Path, monkeypatch) -> None:
    def download(model: str, *, revision: str | None, local_files_only: bool) -> str:
        assert local_files_only, "a start waits for no network"
        folder = tmp_path / "hub" / model / str(revision)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(str(revision)[:2])
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    server, found = Server(tmp_path / "one"), []
    server.set(model_path="org/model", speculative_draft_model_path="org/draft")
    for model, draft in (("v1", "v1"), ("v2", "v1"), ("v1", "v2"), ("v1, as main", "v1")):
        server.set(revision=model, speculative_draft_model_revision=draft)
        found.append(server.key(monkeypatch))
    assert len({*found[:3]}) == 3 and found[3] == found[0]

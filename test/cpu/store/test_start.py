"""A store that cannot be used stops the start with what to change; its identity tells models and layouts apart."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from played_store import Played

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.units import Units
from sglang_dsv4.engine import store_start
from sglang_dsv4.errors import SettingError
from sglang_dsv4.settings import Settings, Store, read_settings
from sglang_dsv4.store import identity
from sglang_dsv4.store.backend import FOLDER
from sglang_dsv4.store.client import State

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
    folder.chmod(0o750)
    store_start.config_of(settings(folder=str(folder)))
    assert "others may read or write" in caplog.text


def test_the_folder_of_the_engine_s_variable_is_looked_at(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "first"))
    config = store_start.config_of(settings(file_storage_path=str(tmp_path / "second")))
    assert store_start.folder_of(config) == str(tmp_path / "first")
    assert (tmp_path / "first").stat().st_mode & 0o777 == 0o700 and not (tmp_path / "second").exists()
    (tmp_path / "first").chmod(0o777)
    store_start.config_of(settings())
    assert "others may read or write" in caplog.text


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

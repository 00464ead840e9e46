"""The plugin costs other processes next to nothing, and a DeepSeek-V4 server does not start without its hooks."""

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from server_fixture import VERSION
from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools

from sglang_dsv4.engine.hooks import engines_class, install
from sglang_dsv4.engine.hooks.install import after_import
from sglang_dsv4.engine.releases import release_for
from sglang_dsv4.engine.state import server
from sglang_dsv4.errors import HooksNotLanded
from sglang_dsv4.pools.token_to_kv import TokenToKVPool
from sglang_dsv4.testing.standalone import PoolSpec, make_pool


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the plugin has run in a fresh process, and no pool has been built."""
    monkeypatch.setattr(server, "installation", None)


@pytest.mark.parametrize(("variable", "value"), [("DSV4_HOST_GB", "-1"), ("DSV4_HOST_GBS", "1")])
def test_a_bad_setting_stops_the_pool(
    new_process: None, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(HooksNotLanded, match=variable):
        make_pool(PoolSpec())


def test_a_version_before_the_window_is_refused_by_name(
    new_process: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(install, "engine_version", lambda: "0.5.21")
    with pytest.raises(HooksNotLanded, match=r"sglang 0.5.21 is not supported .*0.5.22 or later"):
        make_pool(PoolSpec())
    assert "sglang 0.5.21 is not supported" in caplog.text


def test_an_untested_version_is_served_with_a_warning_and_without_prep(
    new_process: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    later = f"{VERSION}.post9"
    monkeypatch.setenv("DSV4_SESSIONS", "auto")
    monkeypatch.setenv("DSV4_STORE", "/nvme/store")
    monkeypatch.setattr(install, "engine_version", lambda: later)
    with caplog.at_level(logging.WARNING):
        make_pool(PoolSpec())
    assert f"sglang {later} is not tested" in caplog.text
    assert f"requests that end is not kept: sglang {later} is not a tested release" in caplog.text
    assert caplog.text.count(f"store: nothing is written or read: sglang {later} is not a tested release") == 1
    assert not any(hook.part in ("prep", "plain") for hook in install.install().hooks)


def test_a_pool_of_this_process_is_ours_whoever_names_the_class() -> None:
    made = PoolSpec()
    stock = engines_class(TokenToKVPool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "DeepSeekV4TokenToKVPool", TokenToKVPool)
        pool = make_pool(made)
    assert type(pool) is TokenToKVPool and isinstance(pool, stock)
    assert type(stock.__new__(stock)) is TokenToKVPool, "a module that kept the engine's class"
    (check,) = type(pool).layout_checks
    assert check.__func__ is release_for(VERSION).layout_refusal.__func__


def test_a_release_without_the_pool_class_keeps_its_other_models(caplog: pytest.LogCaptureFixture) -> None:
    install.watch_for_a_pool(ModuleType("renamed"))
    assert "its DeepSeek-V4 servers stay as they are" in caplog.text


def test_a_module_is_acted_on_right_after_its_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "watched_one.py").write_text("import watched_other\nVALUE = 1\n")
    (tmp_path / "watched_other.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    before, seen = list(sys.meta_path), []
    after_import("watched_one", lambda module: seen.append(module.VALUE))
    (tmp_path / "watched_other.py").write_text("raise RuntimeError")
    with pytest.raises(RuntimeError):
        import watched_one
    (tmp_path / "watched_other.py").write_text("")
    assert importlib.util.find_spec("watched_one") is not None, "neither an import that failed nor a look uses it up"
    import watched_other  # noqa: F401

    assert seen == [] and "watched_one" not in sys.modules
    import watched_one

    assert seen == [1] and sys.meta_path == before, "the watcher is gone"
    after_import("watched_one", seen.append)
    assert seen == [1, watched_one], "it is imported: at once"
    after_import("no_such_module", seen.append)
    with pytest.raises(ModuleNotFoundError):
        import no_such_module  # noqa: F401
    assert len(seen) == 2


# As long as no pool is built, the models of others are left alone; then ours is, in the same process.
ON = """
import sys
from sglang_dsv4.testing.standalone import _define_torchvision_ops
_define_torchvision_ops()
from sglang.srt.plugins import load_plugins
before = set(sys.modules)
load_plugins()
new = {name for name in set(sys.modules) - before if name.startswith("sglang.")}
assert not new - {"sglang.srt.plugins", "sglang.srt.plugins.hook_registry"}, new
assert "torch" in before or "torch" not in sys.modules
from sglang.srt.managers.scheduler import Scheduler, SchedulerWeightUpdaterManager
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.managers import schedule_batch
from sglang.srt.mem_cache import common
from sglang_dsv4.engine.state import server
assert server.watched and server.installation is None
for module in ("sglang_dsv4.pools.token_to_kv", "sglang_dsv4.engine.decode.queue", "sglang_dsv4.prep.builder"):
    assert module not in sys.modules, module
functions = [Scheduler.flush_cache, Scheduler.abort_request, schedule_batch.Req.load_kv_cache]
functions.append(getattr(common, "backup_kv_cache", schedule_batch.Req.offload_kv_cache))
for function in functions:
    assert function.__module__.startswith("sglang.") and not hasattr(function, "__wrapped__"), function
for kind in (DecodePreallocQueue, SchedulerWeightUpdaterManager):
    assert kind.__module__.startswith("sglang."), kind
from sglang_dsv4.testing.standalone import PoolSpec, boot, make_pool
boot()
assert "sglang_dsv4.pools.token_to_kv" not in sys.modules
pool = make_pool(PoolSpec())
from sglang_dsv4.engine.hooks import install
from sglang_dsv4.pools.token_to_kv import TokenToKVPool
assert type(pool) is TokenToKVPool
assert install.install().hooks and install.install().missing() == []
print("as it should be")
"""

OFF = """
from sglang_dsv4.testing.standalone import PoolSpec, boot, make_pool
boot()
from sglang.srt.plugins import load_plugins
load_plugins()
import torch
from sglang.srt.managers.schedule_batch import Req
pool = make_pool(PoolSpec())
for part in (pool, pool.swa_kv_pool, pool.c4_kv_pool, pool.c128_kv_pool, pool.c4_indexer_kv_pool,
             *(state for state in pool.compress_state_pools if state is not None)):
    assert type(part).__module__.startswith("sglang."), type(part)
assert not hasattr(Req.load_kv_cache, "__wrapped__")
try:
    pool.get_cpu_copy(torch.arange(256, 300))
except NotImplementedError as error:
    assert type(error) is NotImplementedError, type(error)
else:
    raise AssertionError("a stock pool made a copy")
print("as it should be")
"""


@pytest.mark.parametrize(("program", "enabled"), [(OFF, "0"), (ON, "1")], ids=["off", "on"])
def test_a_process_of_its_own(program: str, enabled: str) -> None:
    command, env = [sys.executable, "-c", program], {**os.environ, "DSV4_ENABLED": enabled}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("as it should be")


@pytest.mark.parametrize(("layout", "installs"), [("page-major", 1), ("stock", 0)])
def test_with_page_major_pools_the_hooks_are_in_before_the_first_is_sized(monkeypatch, layout, installs):
    class DSV4PoolConfigurator:
        def __init__(self, runner: str) -> None:
            self.runner = runner

    monkeypatch.setenv("DSV4_LAYOUT", layout)
    required: list[int] = []
    installation = SimpleNamespace(require=lambda: required.append(1))
    monkeypatch.setattr(install, "install", lambda: installation)
    install.watch_for_sizes(SimpleNamespace(DSV4PoolConfigurator=DSV4PoolConfigurator))
    assert DSV4PoolConfigurator("a runner").runner == "a runner"
    assert len(required) == installs

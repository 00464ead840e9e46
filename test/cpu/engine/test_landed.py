"""Every hook is in place; one that is not stops the server with its name."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import sglang.srt.plugins as engine_plugins
from server_fixture import LINE, OLD
from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools

from sglang_dsv4 import plugin
from sglang_dsv4.engine import landed
from sglang_dsv4.engine.hooks import HOOKS, Hook, hooks_of, line_of
from sglang_dsv4.engine.landed import Landing
from sglang_dsv4.engine.standalone import PoolSpec, engine_version, make_pool
from sglang_dsv4.errors import HooksNotLanded
from sglang_dsv4.pools.token_to_kv import TokenToKVPool

HERE = hooks_of(LINE or "", prep=True)
ALSO = [(hook, module) for hook in HERE for module in hook.also]
STOCK = TokenToKVPool.__mro__[1]


def name_of(value: Any) -> str:
    return value.target.removeprefix("sglang.srt.") if isinstance(value, Hook) else str(value)


def owner_of(target: str) -> tuple[Any, str]:
    path, name = target.rsplit(".", 1)
    return landed._resolve(path), name


def engines_own(hook: Hook) -> Any:
    """What the target was before the hook."""
    ours = hook.resolve()
    if isinstance(ours, type):
        return ours.__mro__[1]
    owner, name = owner_of(hook.target)
    return getattr(owner, name).__wrapped__


def undo(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    owner, name = owner_of(hook.target)
    monkeypatch.setattr(owner, name, engines_own(hook))


def running() -> Landing:
    """The landing that guards this process's pools."""
    cells = [cell.cell_contents for cell in STOCK.__init__.__closure__]
    return next(content for content in cells if isinstance(content, Landing))


def test_all_hooks_of_this_line_landed() -> None:
    for _, module in ALSO:
        importlib.import_module(module)
    assert running().line == LINE
    assert running().version == engine_version()
    assert running().hooks == HERE
    assert running().missing() == []
    running().require()


def test_the_table_covers_both_lines() -> None:
    assert {line for hook in HOOKS for line in hook.lines} == {"0.5.17", "0.5.23"}
    assert len({(hook.target, hook.lines, hook.kind) for hook in HOOKS}) == len(HOOKS)


@pytest.mark.parametrize("hook", HERE, ids=name_of)
def test_a_hook_that_is_undone_is_named_and_stops_the_server(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    undo(monkeypatch, hook)
    missing = running().missing()
    assert [text.split(":")[0] for text in missing] == [hook.target]
    with pytest.raises(HooksNotLanded) as caught:
        make_pool(PoolSpec())
    assert hook.target in str(caught.value)
    assert engine_version() in str(caught.value)
    assert "DSV4_ENABLED=0" in str(caught.value)
    monkeypatch.undo()
    assert running().missing() == []


@pytest.mark.parametrize(("hook", "module"), ALSO, ids=name_of)
def test_a_module_that_kept_the_engines_own_is_named(monkeypatch: pytest.MonkeyPatch, hook: Hook, module: str) -> None:
    name = hook.target.rsplit(".", 1)[1]
    monkeypatch.setattr(importlib.import_module(module), name, engines_own(hook))
    assert running().missing() == [f"{hook.target}: {module} still holds the engine's own"]
    with pytest.raises(HooksNotLanded, match=module):
        make_pool(PoolSpec())


def test_several_missing_hooks_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for hook in HERE[-3:]:
        undo(monkeypatch, hook)
    with pytest.raises(HooksNotLanded) as caught:
        make_pool(PoolSpec())
    assert all(hook.target in str(caught.value) for hook in HERE[-3:])


def test_a_target_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue

    monkeypatch.delattr(DecodePreallocQueue, "resume_retracted_reqs")
    (text,) = running().missing()
    assert text.startswith("sglang.srt.disaggregation.decode.DecodePreallocQueue.resume_retracted_reqs: ")


def test_a_foreign_wrapper_around_our_hook_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    import functools

    for hook in HERE:
        if isinstance(hook.resolve(), type):
            continue
        owner, name = owner_of(hook.target)
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def outer(*args: Any, _inner: Any = inner, **kwargs: Any) -> Any:
            return _inner(*args, **kwargs)

        for holder in (owner, *(importlib.import_module(module) for module in hook.also)):
            monkeypatch.setattr(holder, name, outer)
    assert running().missing() == []


def install_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``load_plugins`` does in a fresh process: run the plugin, log what it raises, go on."""
    guarded = pools.DeepSeekV4TokenToKVPool  # in this process already the replacement
    monkeypatch.setattr(guarded, "__init__", guarded.__init__)  # put back afterwards
    monkeypatch.setattr(engine_plugins, "_plugins_loaded", False)
    engine_plugins.load_plugins()


@pytest.mark.parametrize(("variable", "value"), [("DSV4_VERIFY", "2"), ("DSV4_HOST_GB", "-1"), ("DSV4_HOSTGB", "1")])
def test_a_bad_setting_is_swallowed_by_the_engine_but_stops_the_pool(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    install_again(monkeypatch)
    with pytest.raises(HooksNotLanded) as caught:
        make_pool(PoolSpec())
    assert variable in str(caught.value)
    assert engine_version() in str(caught.value)
    monkeypatch.undo()
    make_pool(PoolSpec())


def test_any_failure_of_the_plugin_stops_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(landing: Landing) -> None:
        raise ImportError("no module named tomorrow")

    monkeypatch.setattr(plugin, "_register", broken)
    install_again(monkeypatch)
    with pytest.raises(HooksNotLanded, match="no module named tomorrow"):
        make_pool(PoolSpec())


@pytest.mark.parametrize("version", ("0.5.16", "0.5.18", "0.5.21", "0.4.9", "nightly"))
def test_a_version_without_adapter_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    assert line_of(version) is None
    monkeypatch.setattr(plugin, "engine_version", lambda: version)
    with caplog.at_level(logging.ERROR):
        install_again(monkeypatch)
    assert f"sglang {version} has no adapter" in caplog.text
    with pytest.raises(HooksNotLanded, match=f"sglang {version} has no adapter .*0.5.17"):
        make_pool(PoolSpec())


@pytest.mark.parametrize(
    ("version", "line"),
    [("0.5.17", "0.5.17"), ("0.5.17.post1", "0.5.17"), ("0.5.22", "0.5.23"), ("0.5.23", "0.5.23"), ("0.6.0", "0.5.23")],
)
def test_the_line_of_a_version(version: str, line: str) -> None:
    assert line_of(version) == line


def test_a_pool_of_this_process_is_ours() -> None:
    pool = make_pool(PoolSpec())
    assert isinstance(pool, TokenToKVPool)
    assert isinstance(pool, pools.DeepSeekV4TokenToKVPool)
    assert bool(type(pool).layout_checks) is not OLD


DISABLED = """
from sglang_dsv4.engine.standalone import PoolSpec, boot, make_pool
boot()
from sglang.srt.plugins import load_plugins
load_plugins()
import torch
from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools
from sglang.srt.mem_cache import deepseek_v4_compress_state as states
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.managers.schedule_batch import Req
pool = make_pool(PoolSpec())
for part in (pool, pool.swa_kv_pool, pool.c4_kv_pool, pool.c128_kv_pool, pool.c4_indexer_kv_pool,
             *(state for state in pool.compress_state_pools if state is not None)):
    assert type(part).__module__.startswith("sglang."), type(part)
for function in (DecodePreallocQueue.add, DecodePreallocQueue.__init__, Req.offload_kv_cache, Req.load_kv_cache):
    assert not hasattr(function, "__wrapped__"), function
try:
    pool.get_cpu_copy(torch.arange(256, 300))
except NotImplementedError as error:
    assert type(error) is NotImplementedError, type(error)
else:
    raise AssertionError("a stock pool made a copy")
print("stays as it is")
"""


def test_disabled_leaves_the_engine_as_it_is() -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("DSV4_")}
    done = subprocess.run(
        [sys.executable, "-c", DISABLED], env={**env, "DSV4_ENABLED": "0"}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("stays as it is")

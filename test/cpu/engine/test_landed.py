"""Every hook is in place and fits; one that does not stops the server with its name, before anything is served."""

from __future__ import annotations

import functools
import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from server_fixture import HOOKS_HERE, VERSION
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_dsv4.engine import installation, landed
from sglang_dsv4.engine.hooks import HOOKS, PARTS, Hook, hooks_of
from sglang_dsv4.engine.releases import TESTED, is_supported, release_for
from sglang_dsv4.engine.signatures import Parameters, engines_class, mismatch, overrides
from sglang_dsv4.engine.standalone import PoolSpec, make_pool
from sglang_dsv4.errors import HooksNotLanded

ALSO = [(hook, module) for hook in HOOKS_HERE for module in hook.also]
CLASSES = [hook for hook in HOOKS_HERE if hook.kind == "replace"]
OVERRIDES = [(hook, name) for hook in CLASSES for name, _ in overrides(hook.resolve())]


def name_of(value: Any) -> str:
    return value.target.removeprefix("sglang.srt.") if isinstance(value, Hook) else str(value)


def owner_of(target: str) -> tuple[Any, str]:
    path, name = target.rsplit(".", 1)
    return landed._resolve(path), name


def engines_own(hook: Hook) -> Any:
    """What the target was before the hook."""
    ours = hook.resolve()
    return engines_class(ours) if isinstance(ours, type) else landed._resolve(hook.target).__wrapped__


def undo(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    owner, name = owner_of(hook.target)
    monkeypatch.setattr(owner, name, engines_own(hook))


def missing() -> list[str]:
    """Of the landing that guards this process's pools."""
    return installation.install().missing()


def refused(match: str) -> str:
    """How a pool is refused now."""
    with pytest.raises(HooksNotLanded, match=match) as caught:
        make_pool(PoolSpec())
    assert VERSION in str(caught.value) and "DSV4_ENABLED=0" in str(caught.value)
    return str(caught.value)


def test_every_part_is_known() -> None:
    assert {hook.part for hook in HOOKS} == {"", *PARTS}


def test_all_hooks_of_this_release_landed() -> None:
    for _, module in ALSO:
        importlib.import_module(module)
    assert installation.install().hooks == HOOKS_HERE
    assert missing() == []


@pytest.mark.parametrize("hook", HOOKS_HERE, ids=name_of)
def test_a_hook_that_is_undone_is_named_and_stops_the_server(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    undo(monkeypatch, hook)
    assert [text.split(":")[0] for text in missing()] == [hook.target]
    refused(f"{hook.target}: is still the engine's own")


@pytest.mark.parametrize(("hook", "module"), ALSO, ids=name_of)
def test_a_module_that_kept_the_engines_own_is_named(monkeypatch: pytest.MonkeyPatch, hook: Hook, module: str) -> None:
    monkeypatch.setattr(importlib.import_module(module), hook.target.rsplit(".", 1)[1], engines_own(hook))
    refused(f"{hook.target}: {module} still holds the engine's own")


# ------------------------------------------------------------- a later release changes what is hooked


@pytest.mark.parametrize(("hook", "name"), OVERRIDES, ids=name_of)
def test_an_overridden_method_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, hook: Hook, name: str) -> None:
    if name == "__init__":
        pytest.skip("every class has one")
    for owner in engines_class(hook.resolve()).__mro__:  # it may be inherited
        if name in vars(owner):
            monkeypatch.delattr(owner, name)
    refused(f"{hook.target}: has no {name}")


def gains(function: Any, parameter: str) -> Any:
    """``function`` with one more keyword."""
    import inspect

    @functools.wraps(function)
    def longer(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    more = inspect.Parameter(parameter, inspect.Parameter.KEYWORD_ONLY, default=None)
    longer.__signature__ = signature.replace(parameters=[*signature.parameters.values(), more])
    return longer


def test_a_parameter_that_a_hook_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = next(hook for hook in HOOKS_HERE if hook.target.endswith("ScheduleBatch.retract_decode"))
    owner, name = owner_of(hook.target)
    monkeypatch.setattr(owner, name, gains(getattr(owner, name), "priority"))
    refused(f"{hook.target}: has a parameter that this package does not know: priority")


def test_a_parameter_that_is_ignored_goes_on_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = next(hook for hook in HOOKS_HERE if hook.target.endswith("ScheduleBatch.retract_decode"))
    ours, told = hook.resolve(), []
    monkeypatch.setattr(
        ours.__module__ + ".retract_decode", lambda original, batch: (told.append(batch), original(batch))
    )
    patient = replace(hook, ignores=("priority",)).resolve()
    assert patient(lambda batch, priority: priority, "batch", priority=3) == (None, 3) and told == ["batch"]
    assert mismatch(Parameters(("batch", "priority"), False), Parameters(("batch",), False), ("priority",)) is None
    gone = mismatch(Parameters(("batch",), False), Parameters(("batch",), False), ("priority",))
    assert gone == "has no parameter priority", "the entry is out of date"


def test_parameters_in_another_order_are_named() -> None:
    assert "another order: b, a" in (mismatch(Parameters(("b", "a"), False), Parameters(("a", "b"), False)) or "")


def test_nothing_is_changed_where_a_hook_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[Any] = []
    monkeypatch.setattr(HookRegistry, "_apply_target", lambda *args: applied.append(args))
    hook = next(hook for hook in CLASSES if hook.target.endswith("DecodePreallocQueue"))
    monkeypatch.delattr(engines_class(hook.resolve()), "add")
    undo(monkeypatch, HOOKS_HERE[-1])
    monkeypatch.setitem(installation._process, "landing", None)
    refused("has no add")
    assert not applied


# ------------------------------------------------------------------------------------- other plugins


def test_a_foreign_wrapper_around_our_hook_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    for hook in set(HOOKS_HERE) - set(CLASSES):
        owner, name = owner_of(hook.target)
        outer = functools.wraps(getattr(owner, name))(lambda *args, **kwargs: None)
        for holder in (owner, *(importlib.import_module(module) for module in hook.also)):
            monkeypatch.setattr(holder, name, outer)
    assert missing() == []


def test_a_target_that_another_plugin_hooked_before_gets_our_hook_too(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = next(hook for hook in HOOKS_HERE if hook.target.endswith("Scheduler.flush_cache"))
    undo(monkeypatch, hook)
    theirs: list[Any] = []
    HookRegistry._apply_target(hook.target, [(HookType.BEFORE, lambda *args: theirs.append(args), None)])
    monkeypatch.setattr(HookRegistry, "_patched", {*HookRegistry._patched, hook.target})
    installation._apply((hook,))
    assert missing() == []
    owner, name = owner_of(hook.target)
    scheduler = SimpleNamespace(is_fully_idle=lambda **_: False, _engine_paused=False, waiting_queue=[])
    scheduler.running_batch = SimpleNamespace(reqs=[])
    assert getattr(owner, name)(scheduler) is False and len(theirs) == 1


# --------------------------------------------------------------------------------- the table itself


@pytest.mark.parametrize("hook", HOOKS, ids=name_of)
def test_every_entry_says_why_and_when_it_goes(hook: Hook) -> None:
    assert hook.why and hook.gone_when
    assert any(hook.covers(version) for version in (*TESTED, VERSION)), "no tested release uses it"


@pytest.mark.parametrize("version", TESTED)
def test_every_release_has_what_the_table_names(version: str) -> None:
    for hook in hooks_of(version, *PARTS):
        assert callable(hook.resolve())


@pytest.mark.parametrize(
    ("version", "answers"),
    [
        ("0.5.22", "v0_5_22"), ("0.5.22.post1", "v0_5_22"), ("0.5.23", "base"), ("0.5.24.dev7+gabc", "base"),
        ("0.6.0", "base"), ("0.5.17", None), ("0.5.21", None), ("0.4.9", None), ("nightly", None),
    ],
)  # fmt: skip
def test_the_answers_for_a_version(version: str, answers: str | None) -> None:
    assert is_supported(version) is bool(hooks_of(version)) is (answers is not None)
    if answers is None:
        with pytest.raises(ValueError, match=r"0\.5\.22 or later"):
            release_for(version)
    else:
        assert type(release_for(version)).__module__.endswith(f".{answers}")

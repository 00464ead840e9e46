"""Every hook is in place and fits; one that does not stops the server with its name, before anything is served."""

import functools
import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from server_fixture import HOOKS_HERE, VERSION
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_dsv4.engine.hooks import Hook, engines_class, install, member, mismatch, overrides, parameters_of
from sglang_dsv4.engine.hooks.table import HOOKS, hooks_of
from sglang_dsv4.engine.releases import TESTED, is_supported, release_for
from sglang_dsv4.engine.state import server
from sglang_dsv4.errors import HooksNotLanded
from sglang_dsv4.testing.standalone import PoolSpec, make_pool

ALSO = [(hook, module) for hook in HOOKS_HERE for module in hook.also]
CLASSES = [hook for hook in HOOKS_HERE if hook.kind == "replace"]
OVERRIDES = [(hook, name) for hook in CLASSES for name, _ in overrides(hook.resolve())]


def name_of(value: Any) -> str:
    return value.target.removeprefix("sglang.srt.") if isinstance(value, Hook) else str(value)


def owner_of(target: str) -> tuple[Any, str]:
    path, name = target.rsplit(".", 1)
    return member(path), name


def engines_own(hook: Hook) -> Any:
    """What the target was before the hook."""
    ours = hook.resolve()
    return engines_class(ours) if isinstance(ours, type) else member(hook.target).__wrapped__


def undo(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    owner, name = owner_of(hook.target)
    monkeypatch.setattr(owner, name, engines_own(hook))


def missing() -> list[str]:
    """Of the installation that guards this process's pools."""
    return install.install().missing()


def refused(match: str) -> str:
    with pytest.raises(HooksNotLanded, match=match) as caught:
        make_pool(PoolSpec())
    assert VERSION in str(caught.value) and "DSV4_ENABLED=0" in str(caught.value)
    return str(caught.value)


def test_all_hooks_of_this_release_landed() -> None:
    for _, module in ALSO:
        importlib.import_module(module)
    assert install.install().hooks == HOOKS_HERE
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


@pytest.mark.parametrize(("hook", "name"), OVERRIDES, ids=name_of)
def test_an_overridden_method_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, hook: Hook, name: str) -> None:
    if name == "__init__":
        pytest.skip("every class has one")
    for owner in engines_class(hook.resolve()).__mro__:  # it may be inherited
        if name in vars(owner):
            monkeypatch.delattr(owner, name)
    refused(f"{hook.target}: has no {name}")


FITS = [  # the engine's parameters, ours; why it does not fit
    ("batch", "batch, priority", "has no parameter priority"),
    ("b, a", "a, b", "takes its parameters in another order: b, a"),
    ("a, b", "a, **more", "has a parameter that this package does not know: b"),
    ("a, *, b", "a, *more", "has a parameter that this package does not know: b"),
    ("a, *, b", "a, **more", None),
    ("a, b", "a, *others, b", "takes b by position, too"),
    ("a, *, b", "a, b", "takes b by keyword alone"),
    ("a, b", "a, b, /", "takes a by keyword, too"),
    ("a, b=1", "a, b", "may be called without b"),
    ("a, b", "a, b=1", None),
    ("a, **more", "a", "takes any more parameters, which this package does not"),
]


@pytest.mark.parametrize(("target", "ours", "reason"), FITS)
def test_a_hook_takes_its_parameters_as_the_engine_may_pass_them(target: str, ours: str, reason: str | None) -> None:
    made: dict[str, Any] = {}
    exec(f"def target({target}): ...\ndef ours({ours}): ...", made)
    assert mismatch(*(parameters_of(made[name], 0) for name in ("target", "ours"))) == reason


FUNCTIONS = [  # but for one that takes keywords alone
    hook for hook in HOOKS_HERE if hook.kind != "replace" and not hook.target.endswith(".attach_canary_buffers")
]
CHANGED = {"add_transfer_request": "kv_indices", "transfer_worker": "queue"}  # what a hook passes on in another form


class Foreign(int):
    """A zero that is also a thing of the engine without anything of ours in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dsv4" in name:
            raise AttributeError(name)
        return None if name == "written" else Foreign()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Foreign()

    def __getitem__(self, key: Any) -> Any:
        return Foreign()

    def __iter__(self) -> Any:
        return iter(())


def call_of(signature: inspect.Signature, way: str) -> inspect.BoundArguments:
    """A call of it: all by position, all by keyword but for what a method is bound to, or what has no default."""
    named = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    values = {p.name: Foreign() for p in named if way != "the least" or p.default is p.empty}
    if way != "by keyword":
        return inspect.BoundArguments(signature, values)  # type: ignore[arg-type]
    first = values.pop(named[0].name)
    return SimpleNamespace(args=(first,), kwargs=values)  # type: ignore[return-value]


@pytest.mark.parametrize("way", ["by position", "by keyword", "the least"])
@pytest.mark.parametrize("hook", FUNCTIONS, ids=name_of)
def test_a_hook_works_however_the_engine_passes_its_arguments(
    monkeypatch: pytest.MonkeyPatch, hook: Hook, way: str
) -> None:
    signature = inspect.signature(member(hook.target))
    got: list[dict[str, Any]] = []

    def original(*args: Any, **kwargs: Any) -> Any:
        got.append(signature.bind(*args, **kwargs).arguments)
        return Foreign()

    original.__signature__ = signature  # type: ignore[attr-defined]
    owner, name = owner_of(hook.target)
    monkeypatch.setattr(owner, name, original)
    call, ours = call_of(signature, way), hook.resolve()
    leading = {"around": [original], "after": [Foreign()], "before": []}[hook.kind]
    ours(*leading, *call.args, **call.kwargs)
    sent = signature.bind(*call.args, **call.kwargs).arguments
    if hook.kind == "around":
        (arguments,) = got
        assert all(arguments[name] is sent[name] for name in sent if name != CHANGED.get(owner_of(hook.target)[1]))


def test_nothing_is_changed_where_a_hook_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[Any] = []
    monkeypatch.setattr(HookRegistry, "_apply_target", lambda *args: applied.append(args))
    hook = next(hook for hook in CLASSES if hook.target.endswith("DecodePreallocQueue"))
    monkeypatch.delattr(engines_class(hook.resolve()), "add")
    undo(monkeypatch, HOOKS_HERE[-1])
    monkeypatch.setattr(server, "installation", None)
    refused("has no add")
    assert not applied


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
    install._apply((hook,))
    assert missing() == []
    owner, name = owner_of(hook.target)
    scheduler = SimpleNamespace(is_fully_idle=lambda **_: False, _engine_paused=False, waiting_queue=[])
    scheduler.running_batch = SimpleNamespace(reqs=[])
    assert getattr(owner, name)(scheduler) is False and len(theirs) == 1


@pytest.mark.parametrize("hook", HOOKS, ids=name_of)
def test_every_entry_says_why_and_when_it_goes(hook: Hook) -> None:
    assert hook.why and hook.gone_when
    assert any(hook.covers(version) for version in (*TESTED, VERSION)), "no tested release uses it"


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

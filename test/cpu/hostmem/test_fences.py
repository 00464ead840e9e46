"""Where a processor may reorder stores, the kernel's membarrier orders them, or ranks do not share at all."""

from __future__ import annotations

import platform

import pytest

from sglang_dsv4.hostmem import fences

X86 = {"x86_64": 324}  # the same system call


@pytest.fixture
def _reorders(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine, as if it reordered stores; the system call is real."""
    monkeypatch.setattr(fences, "IN_ORDER", frozenset())
    monkeypatch.setattr(fences, "MEMBARRIER", fences.MEMBARRIER | X86)
    if fences.why_unordered() is not None:
        pytest.skip(f"this kernel has no membarrier: {platform.release()}")


def test_stores_in_order_need_nothing() -> None:
    assert fences.why_unordered() is None
    assert fences.fence_of_this_rank() is fences.no_fence


@pytest.mark.usefixtures("_reorders")
def test_the_kernel_takes_the_fence() -> None:
    fence = fences.fence_of_this_rank()
    assert fence is not fences.no_fence
    fence()


@pytest.mark.usefixtures("_reorders")
@pytest.mark.parametrize("answers", [(-1,), (0,), (fences.GLOBAL_EXPEDITED,), (fences.REGISTER,)])
def test_a_kernel_without_it_is_told(monkeypatch: pytest.MonkeyPatch, answers: tuple[int, ...]) -> None:
    """An old one, or a sandbox that forbids the call."""
    monkeypatch.setattr(fences, "_membarrier", lambda _: lambda command: answers[command])
    assert "needs the kernel's membarrier" in str(fences.why_unordered())


@pytest.mark.usefixtures("_reorders")
@pytest.mark.parametrize("refused", [fences.REGISTER, fences.GLOBAL_EXPEDITED])
def test_a_fence_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    monkeypatch.setattr(fences, "_membarrier", lambda _: lambda command: -1 if command == refused else 0)
    with pytest.raises(OSError, match="membarrier"):
        fences.fence_of_this_rank()()


def test_a_processor_that_is_not_known_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "a riscv64 may see" in str(fences.why_unordered())

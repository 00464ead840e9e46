"""Each test lies in the folder of its kind: cpu runs everywhere, gpu on a card, server starts servers there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
KINDS = ("cpu", "gpu", "server")
FILES = sorted(path.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))
NO_CARD = "no CUDA device: compiled kernels and real streams cannot run"
NO_SERVER = "no CUDA device, or no SERVER_MODEL: no server can be started"
# A test that only a card can run: it would be skipped in test/cpu for ever, and pass as one that ran nowhere.
NEEDS_CARD = re.compile(r"skip.*(not torch\.cuda\.is_available\(\)|torch\.cuda\.device_count\(\)|no CUDA)")


def test_every_test_file_lies_in_a_folder_of_its_kind():
    assert {path.parts[0] for path in FILES} == set(KINDS)
    assert len({path.name for path in FILES}) == len(FILES), "pytest imports test files by their bare names"


def test_nothing_in_cpu_waits_for_a_card():
    cpu = [path for path in FILES if path.parts[0] == "cpu" and path.name != Path(__file__).name]
    assert [str(path) for path in cpu if NEEDS_CARD.search((TESTS / path).read_text())] == []


class Item:
    """A collected test, of which only the folder is known."""

    def __init__(self, path: Path) -> None:
        self.path, self.marks = TESTS / path, []

    def add_marker(self, mark) -> None:
        self.marks.append(mark)


@pytest.mark.parametrize("card", [False, True])
def test_a_test_is_marked_by_its_folder_and_without_a_card_skipped_by_name(request, monkeypatch, card):
    monkeypatch.setenv("TRITON_INTERPRET", "0" if card else "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    monkeypatch.setenv("SERVER_MODEL", "a folder")
    items = [Item(path) for path in FILES]
    request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py")).pytest_collection_modifyitems(items)
    for item, path in zip(items, FILES, strict=True):
        kind, *skips = item.marks
        assert kind == path.parts[0]
        reasons = {"cpu": [], "gpu": [NO_CARD], "server": [NO_SERVER]}[kind]
        assert [mark.kwargs["reason"] for mark in skips] == ([] if card else reasons)


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[0] == "gpu"], ids=str)
def test_what_needs_a_card_is_collected_without_one(path):
    """Else nobody would be told that it is skipped."""
    spec = importlib.util.spec_from_file_location(f"collected_{path.stem}", TESTS / path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))

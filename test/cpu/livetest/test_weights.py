"""The weights drill: it updates only while a copy is alive, always goes on, and counts copies that were not used."""

from __future__ import annotations

import base64
import pickle
from types import SimpleNamespace

import pytest

from sglang_dsv4.livetest import weights

TENSORS = weights.new_norm(8, 1.5)
ALIVE = "[t] saved 700 tokens, 1.9 MB in 1.50 ms; copies alive 1, 0.30 of 1.00 GiB held\n"


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """A prefill and a decode server that remember what was posted to them, and the decode log."""
    log = tmp_path / "decode.log"
    log.write_text(ALIVE)
    posted: list[tuple[str, str]] = []
    answer = {"success": True, "message": ""}

    def post(url: str, path: str, body: dict, timeout: float) -> dict:
        posted.append((url, path))
        if path == "/update_weights_from_tensor":
            assert (body["load_format"], body["flush_cache"]) == ("direct", False)
            ((name, weight),) = pickle.loads(base64.b64decode(*body["serialized_named_tensors"]))
            assert name == "model.norm.weight"
            assert weight.shape == (8,)
        return answer

    monkeypatch.setattr(weights.servers, "post", post)
    monkeypatch.setattr(weights.time, "sleep", lambda _: None)
    started = [SimpleNamespace(url=role, role=role, log=log) for role in ("prefill", "decode")]
    return SimpleNamespace(started=started, log=log, posted=posted, answer=answer)


def test_both_are_paused_updated_and_continued(pair):
    assert weights.update(pair.started, TENSORS, pair.log)
    steps = ("/pause_generation", "/update_weights_from_tensor", "/continue_generation")
    assert pair.posted == [(role, step) for step in steps for role in ("prefill", "decode")]


def test_a_refused_update_is_loud_and_the_servers_go_on(pair):
    pair.answer |= {"success": False, "message": "no such file"}
    with pytest.raises(RuntimeError, match="prefill did not update its weights: no such file"):
        weights.update(pair.started, TENSORS, pair.log)
    assert [path for _, path in pair.posted].count("/continue_generation") == 2


def test_the_judgement():
    log = {"saves": 9, "loads": 7, "fallbacks": {"StaleWeights": 1}, "copies_alive_at_end": 0, "trouble": []}
    fine = {"lost": 0, "refused": 0}
    assert all(entry["ok"] for entry in weights.judge(3, 3, fine, log, alive=True))
    for found in (
        weights.judge(2, 3, fine, log, alive=True),
        weights.judge(3, 3, {"lost": 0, "refused": 1}, log, alive=True),
        weights.judge(3, 3, fine, log | {"loads": 9}, alive=True),
        weights.judge(3, 3, fine, log | {"fallbacks": {}}, alive=True),
        weights.judge(3, 3, fine, log | {"copies_alive_at_end": 1}, alive=True),
        weights.judge(3, 3, fine, log, alive=False),
    ):
        assert sum(not entry["ok"] for entry in found) == 1

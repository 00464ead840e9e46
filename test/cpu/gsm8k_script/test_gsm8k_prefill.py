"""A decode server with its prefill server."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

from fake_server import Run, Server, right


def test_disaggregated(run: Run, serve: Callable[..., Server]) -> None:
    prefill, decode, plain = serve(lambda *_: "77"), serve(right), serve(right)
    words = ("--prefill-url", prefill.url, "--bootstrap-host", "10.0.0.1", "--bootstrap-port", "8999")
    assert run(decode.url, *words, "--compare-url", plain.url) == 0
    assert run.last()["run"]["accuracy"] == 1
    rooms = {body["bootstrap_room"] for _, body in decode.asked}
    assert len(rooms) == len(decode.asked) == len(prefill.asked) == 10
    assert all(0 <= room < 2**63 for room in rooms)
    by_room = {body["bootstrap_room"]: (path, body) for path, body in prefill.asked}
    for path, body in decode.asked:
        assert by_room[body["bootstrap_room"]] == (path, body)
        assert (path, body["bootstrap_host"], body["bootstrap_port"]) == ("/generate", "10.0.0.1", 8999)
    assert not any("bootstrap_room" in body for _, body in plain.asked)


def test_disaggregated_are_asked_together(run: Run, serve: Callable[..., Server]) -> None:
    together = threading.Barrier(2)

    def reply(question: str, body: dict) -> str:
        together.wait(20)
        return right(question, body)

    prefill, decode = serve(reply), serve(reply)
    assert run(decode.url, "--prefill-url", prefill.url, "--concurrency", "1") == 0
    assert (prefill.peak, decode.peak) == (1, 1)
    assert decode.asked[0][1]["bootstrap_host"] == "127.0.0.1"
    assert decode.asked[0][1]["bootstrap_port"] == 8998


def test_disaggregated_compare(run: Run, serve: Callable[..., Server]) -> None:
    prefill, decode, plain = serve(right), serve(right), serve(right)
    words = ("--compare-url", decode.url, "--compare-prefill-url", prefill.url, "--compare-bootstrap-port", "1")
    assert run(plain.url, *words) == 0
    assert {body.get("bootstrap_port") for _, body in plain.asked} == {None}
    assert {body["bootstrap_port"] for _, body in decode.asked} == {1}
    assert len(prefill.asked) == 10


def test_prefill_error_is_told(run: Run, serve: Callable[..., Server]) -> None:
    prefill, decode = serve(lambda *_: (500, "prefill broke")), serve(right)
    assert run(decode.url, "--prefill-url", prefill.url) == 0  # the answer of the decode server counts
    assert run.last()["run"]["prefill_errors"] == 10
    assert "run: 10 answered although the prefill server reported an error" in run.out
    broken = serve(lambda *_: (500, "decode broke"))
    assert run(broken.url, "--prefill-url", prefill.url) == 1
    assert re.search("decode broke.*prefill broke", run.result()["rows"][0]["error"])

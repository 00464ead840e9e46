"""The comparison of choices: rounding passes, a foreign row does not, and a control that says nothing is noticed."""

import base64
import itertools
from array import array
from types import SimpleNamespace

import pytest
from fake_http import Plain, row_of, running

from sglang_dsv4.command_line import CommandError
from sglang_dsv4.livetest import choices
from sglang_dsv4.livetest.load import Answer, Load

TINY = choices.Shape(layers=6, by_token=1, experts=6)
ROW = array("i", row_of([11, 12]))


def changed(**places: int) -> array:
    """A row with other experts at these places: p7 is the second one of the second layer."""
    row = ROW[:]
    for place, expert in places.items():
        row[int(place[1:])] = expert
    return row


def test_a_row_is_read_from_the_config_and_from_what_the_engine_sends():
    assert choices.Shape.of("tools/tiny_checkpoint/v4") == TINY
    with pytest.raises(CommandError, match="num_hidden_layers, num_hash_layers, num_experts_per_tok is needed"):
        choices.Shape.of("tools")
    text = base64.b64encode(ROW + changed(p7=3)).decode()
    assert TINY.rows(text) == [ROW, changed(p7=3)] and TINY.rows("") == []
    for wrong in (base64.b64encode(ROW[1:]).decode(), "AAA", "AAAA", "?"):
        with pytest.raises(ValueError, match="choices"):
            TINY.rows(wrong)


def test_the_order_of_experts_means_nothing():
    order = array("i", [expert for layer in range(6) for expert in reversed(ROW[6 * layer :][:6])])
    assert TINY.compare(order, ROW) == {
        "positions": 1, "by_token_differ": 0, "by_token_recorded": 1, "foreign": 0, "swapped": 0
    }  # fmt: skip


@pytest.mark.parametrize(("differ", "foreign"), [(1, 0), (15, 0), (16, 1), (30, 1)])
def test_a_position_is_foreign_where_more_than_half_of_its_experts_are_others(differ, foreign):
    found = TINY.compare(changed(**{f"p{place}": 1000 + place for place in range(6, 6 + differ)}), ROW)
    assert (found["swapped"], found["foreign"], found["by_token_differ"]) == (differ, foreign, 0)


def test_layers_by_token_must_be_equal_and_may_be_empty():
    assert TINY.compare(changed(p0=999), ROW)["by_token_differ"] == 1
    empty = array("i", [0] * 6) + ROW[6:]
    found = TINY.compare(empty, empty)
    assert (found["by_token_differ"], found["by_token_recorded"], found["swapped"]) == (0, 0, 0)


def test_a_control_that_takes_a_prompt_from_its_prefix_cache_compares_nothing(monkeypatch, capsys):
    prompt, tokens = [11, 12, 13], [36, 37]
    sent = array("i", itertools.chain(*(row_of([*prompt, *tokens][: end + 1]) for end in range(4))))
    answer = Answer("whole", tokens, prompt=3, choices=base64.b64encode(sent).decode())
    arguments = SimpleNamespace(plain=True, timeout=5, row=TINY)
    with running(Plain) as url:
        control, load = choices.Control(url, arguments), Load([prompt] * 2, [2] * 2)
        found = control.compared(load, [answer, Answer("too_few")])
        assert (found["choices_compared"], found["positions"], found["foreign"]) == (1, 4, 0)
        post = choices.servers.post
        monkeypatch.setattr(
            choices.servers, "post", lambda url, path, body, timeout: post(url, path, body | {"extra_key": ""}, timeout)
        )
        assert control.compared(load, [answer] * 2)["choices_compared"] == 0
    assert "5 tokens from its prefix cache" in capsys.readouterr().out


def test_whole_answers_with_too_few_or_too_many_rows_are_counted():
    def answer(rows: int, outcome: str = "whole") -> Answer:
        return Answer(outcome, [1, 2], prompt=2, choices=base64.b64encode(ROW * rows).decode())

    assert choices.misshapen([answer(3), answer(2), answer(4), answer(0), answer(0, "refused")], TINY) == 3


def rows(**change: float) -> list[dict]:
    control = {"choices_compared": 60, "by_token_differ": 0, "foreign": 0.001, "swapped": 0.05}
    return [
        {"run": "score of control", **control, "foreign_if_shifted": change.pop("shifted", 0.99)},
        {"run": "score of retracts", **control, **change},
        {"run": "score of choices zeroed", **control, "foreign": change.pop("zeroed", 0.4)},
    ]


@pytest.mark.parametrize(("change", "missed"), [
    ({"foreign": 0.0015, "swapped": 0.07}, []), ({"foreign": 0.0016}, ["share of foreign positions, after retracts"]),
    ({"swapped": 0.071}, ["share of experts swapped, after retracts"]),
    ({"by_token_differ": 1}, ["positions that chose otherwise by token id"]),
    ({"choices_compared": 59}, ["choices compared, answers after retracts"]),
    ({"shifted": 0.89}, ["share of positions that a shift would make foreign"]),
    ({"zeroed": 0.05}, ["share of foreign positions, choices zeroed"]),
])  # fmt: skip
def test_each_fault_misses_its_bound(change, missed):
    assert [bound["name"] for bound in choices.judge(rows(**change), 60, 0) if not bound["ok"]] == missed

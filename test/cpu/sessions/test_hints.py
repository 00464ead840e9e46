"""Hints set rank, priority, time to live and prefetch; no input of a client raises or makes a series of its own."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dsv4.sessions.hints import LONGEST_TTL, MOST_HINTS, OTHER, TYPES, Hints, Rank, hints_of

try:
    from sglang.srt.managers.kv_hints import decode_kv_hints_envelope
except ImportError:  # an engine without kv_hints: its requests have None there
    decode_kv_hints_envelope = None

needs_envelope = pytest.mark.skipif(decode_kv_hints_envelope is None, reason="this release has no kv_hints")
KEPT = (Rank.RETAINED, 5, 600.0)


def envelope(*actions):
    """What a request has whose client sent these (type, payload), as the engine decodes them."""
    numbered = [
        {"action_id": str(number), "action_type": name, "action_version": "1.0", "payload": payload}
        for number, (name, payload) in enumerate(actions)
    ]
    return decode_kv_hints_envelope({"protocol_version": "0.1", "message_id": "m", "actions": numbered})


def from_envelope(*actions):
    return hints_of(envelope(*actions), None)


def from_custom_params(*actions):
    return hints_of(None, dict(actions))


routes = pytest.mark.parametrize(
    "read", [pytest.param(from_envelope, marks=needs_envelope), from_custom_params], ids=["kv_hints", "custom_params"]
)


def test_ranks_are_in_the_order_of_eviction():
    assert sorted(Rank, key=int) == [Rank.EXPIRED, Rank.DEMOTED, Rank.PLAIN, Rank.RETAINED, Rank.PINNED]


@routes
@pytest.mark.parametrize(
    ("name", "payload", "wanted"),
    [
        ("kv.retain", {"ttl_seconds": 600, "priority": 5}, Hints(*KEPT)),
        ("kv.retain", {}, Hints(Rank.RETAINED, ttl_seconds=3600.0)),
        ("kv.retain", {"priority": -7}, Hints(Rank.RETAINED, -7, 3600.0)),
        ("kv.pin", {"ttl_seconds": 0.5}, Hints(Rank.PINNED, 0, 0.5)),
        ("kv.pin", {"ttl_seconds": 0}, Hints(Rank.PINNED, 0, 0.0)),
        ("kv.demote", {}, Hints(Rank.DEMOTED)),
        ("kv.prefetch", {}, Hints(prefetch=True)),
    ],
)
def test_a_hint_is_taken(read, name, payload, wanted):
    found = read((name, payload))
    assert found.outcomes == ((name, "taken"),)
    assert (found.rank, found.priority, found.ttl_seconds, found.prefetch) == (
        wanted.rank, wanted.priority, wanted.ttl_seconds, wanted.prefetch,
    )  # fmt: skip
    assert type(found.ttl_seconds) in (float, type(None))


@routes
@pytest.mark.parametrize(
    ("name", "payload"),
    [
        *(("kv.retain", {"ttl_seconds": ttl}) for ttl in (-1, -1e-9, math.nan, math.inf, "600", None, True, 2e9)),
        *(("kv.retain", {"priority": priority}) for priority in (1.5, "5", None, True, 10**7, -(10**7), math.nan)),
        ("kv.retain", {"ttl": 600}),  # a misspelt field would keep it for ever
        ("kv.pin", {"ttl_seconds": 600, "priority": 5}),
        ("kv.pin", {"ttl_seconds": 600, "target": "the first half"}),
        ("kv.pin", {}),
        ("kv.demote", {"ttl_seconds": 600}),
        ("kv.prefetch", {"at": 5}),
    ],
)
def test_a_payload_that_is_not_valid_changes_nothing(read, name, payload):
    assert read((name, payload)) == Hints(outcomes=((name, "bad"),))
    found = read(("kv.retain" if name != "kv.retain" else "kv.pin", {"ttl_seconds": 9}), (name, payload))
    assert found.ttl_seconds == 9 and found.outcomes[1] == (name, "bad")


@pytest.mark.parametrize("payload", [None, True, 600, "600", [], [600], math.nan])
def test_a_payload_that_is_no_object_is_bad(payload):
    assert hints_of(None, {"kv.prefetch": payload}) == Hints(outcomes=(("kv.prefetch", "bad"),))


@routes
def test_unknown_types_are_counted_under_one_label_and_shares_are_refused(read):
    found = read(("kv.fetch", {"ttl_seconds": 1}), ("kv.share", {}), ("kv.Retain", {}), ("kv.retain", {"priority": 5}))
    assert found.outcomes == ((OTHER, "unknown"), ("kv.share", "refused"), (OTHER, "unknown"), ("kv.retain", "taken"))
    assert (found.rank, found.priority) == (Rank.RETAINED, 5)


def test_a_prompt_is_shared_where_there_is_a_store():
    shared = {"kv.share": {}, "kv.pin": {"ttl_seconds": 9}}
    outcomes = (("kv.share", "taken"), ("kv.pin", "taken"))
    assert hints_of(None, shared, has_store=True) == Hints(Rank.PINNED, 0, 9.0, share=True, outcomes=outcomes)
    assert hints_of(None, {"kv.share": {"tokens": 5}}, has_store=True) == Hints(outcomes=(("kv.share", "bad"),))
    assert not hints_of(None, {"kv.prefetch": {}}, has_store=True).share


@routes
def test_the_last_hint_sets_rank_priority_and_end_together(read):
    kept = ("kv.retain", {"ttl_seconds": 600, "priority": 5})
    assert read(kept, ("kv.prefetch", {}), ("kv.demote", {})) == Hints(
        Rank.DEMOTED,
        prefetch=True,
        outcomes=tuple((name, "taken") for name in ("kv.retain", "kv.prefetch", "kv.demote")),
    )
    found = read(("kv.demote", {}), ("kv.prefetch", {}), kept)
    assert (found.rank, found.priority, found.ttl_seconds, found.prefetch) == (*KEPT, True)


@needs_envelope
def test_the_orchestrators_hints_come_after_the_clients():
    found = hints_of(envelope(("kv.demote", {})), {"kv.pin": {"ttl_seconds": 60}})
    assert found == Hints(Rank.DEMOTED, outcomes=(("kv.pin", "taken"), ("kv.demote", "taken")))


@pytest.mark.parametrize(
    "custom_params", [None, {}, [], "kv.retain", {"thinking_budget": 5, 7: 8, "__req__": object()}]
)
def test_parameters_of_others_are_no_hints(custom_params):
    assert hints_of(None, custom_params) == Hints()


def test_hints_reach_the_scheduler_through_the_engines_messages():
    """Nested one level deeper they would not, with SGLANG_USE_PICKLE_IPC=0."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    sent = {"kv.retain": {"ttl_seconds": 600, "priority": 5}, "kv.prefetch": {}}
    message = msgspec.msgpack.encode(SamplingParams(custom_params=sent))
    found = hints_of(None, msgspec.msgpack.decode(message, type=SamplingParams).custom_params)
    assert (found.rank, found.priority, found.ttl_seconds, found.prefetch) == (*KEPT, True)


fields = st.sampled_from(("ttl_seconds", "priority", "ttl")) | st.text(max_size=3)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(fields, inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(tuple(TYPES)) | st.text(max_size=4).map("kv.{}".format)


@given(st.dictionaries(names | st.integers(), anything, max_size=6) | anything)
def test_no_input_raises_nor_leaves_the_bounds(custom_params):
    found = hints_of(None, custom_params)
    assert {name for name, _ in found.outcomes} <= {*TYPES, OTHER}
    assert {outcome for _, outcome in found.outcomes} <= {"taken", "unknown", "bad", "refused"}
    assert type(found.priority) is int and abs(found.priority) <= 10**6
    assert found.ttl_seconds is None or (type(found.ttl_seconds) is float and 0 <= found.ttl_seconds <= LONGEST_TTL)
    assert found.rank is not Rank.PINNED or found.ttl_seconds is not None
    assert found.rank is not Rank.EXPIRED


def test_more_hints_than_a_request_may_have_are_not_read():
    """Hundreds of thousands fit a request, and the scheduler would read them for a second."""
    some = {f"kv.{number}": {} for number in range(MOST_HINTS - 1)} | {"kv.demote": {}}
    assert (hints_of(None, some).rank, len(hints_of(None, some).outcomes)) == (Rank.DEMOTED, MOST_HINTS)
    assert hints_of(None, some | {"kv.prefetch": {}}) == Hints(outcomes=((OTHER, "refused"),))

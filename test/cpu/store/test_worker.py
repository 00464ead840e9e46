"""A real store process is spoken to as its scheduler does; its store lies, and it or its scheduler is killed."""

import os
import select
import signal
import time
from operator import attrgetter
from pathlib import Path

import lying_backend
import numpy as np
import psutil
import pytest
from store_scheduler import TAIL, UNIT, Prompt, Scheduler, eventually, file_of

from sglang_dsv4.store.seal import SEAL_BYTES
from sglang_dsv4.store.wire import GET, MAIL, PUT, Code, Kind, Piece, Spot

END = 5
PROMPT = Prompt(1, 7)
ALL = END + TAIL


@pytest.fixture
def start(tmp_path):
    """Starts processes of files in tmp_path, or of a lying store; all end with the test. orders: its first."""
    begun = []

    def begin(orders=None, **more):
        backend, config = "file", {"file_storage_path": str(tmp_path)}
        if orders is not None:
            (tmp_path / "orders").write_text(orders)
            backend = "dynamic"
            config = {"backend_name": "lying", "module_path": lying_backend.__name__, "class_name": "Lying"}
            config["orders"] = str(tmp_path / "orders")
        begun.append(Scheduler(more.pop("backend", backend), more.pop("config", config), **more))
        return begun[-1]

    begin.folder = tmp_path
    yield begin
    for scheduler in begun:
        scheduler.close()


def obey(start, orders):
    (start.folder / "orders").write_text(orders)


def files_of(start, pieces):
    return [
        file_of(start.folder, piece.key.hex() + ("p" if not piece.part else f"w{piece.part - 1}")) for piece in pieces
    ]


def test_the_command_writes_finds_loads_and_ends(start):
    first = start(command=["-m", "sglang_dsv4.testing.store_worker", "file"])
    first.wait(Kind.READY, seconds=100)
    arena = max(
        (m for m in psutil.Process(first.pid).memory_maps(grouped=False) if "memfd:test" in m.path),
        key=attrgetter("size"),
    )
    assert arena.rss == arena.size >= first.hello["arena_bytes"], "a page of it costs no fault at its first use"
    first.store(1, PROMPT, END)
    assert first.found(2, PROMPT) == END
    assert first.loaded(2, PROMPT, END) == [Code.OK] * ALL
    first.check_units(PROMPT, END)
    eventually(lambda: first.words[MAIL // 8] == first.packets)  # counted behind the send
    assert first.words[PUT // 8] > 0 < first.words[GET // 8]
    first.send(Kind.DRAIN, count=5000)
    first.wait(Kind.BYE)
    assert first.ends() == 0


def test_another_process_loads_what_one_wrote(start):
    start().ready().store(1, PROMPT, END)
    second = start().ready()
    assert second.found(7, PROMPT, at=100) == END
    assert second.loaded(7, PROMPT, END) == [Code.OK] * ALL
    second.check_units(PROMPT, END)


def test_files_are_the_units_and_a_seal(start):
    start().ready().store(1, PROMPT, END)
    for piece, path in zip(PROMPT.pieces(END), files_of(start, PROMPT.pieces(END)), strict=True):
        raw = np.frombuffer(path.read_bytes(), np.uint8)
        assert (raw[:UNIT] == PROMPT.content(piece.key, piece.part)).all()
        assert (raw[UNIT + SEAL_BYTES :] == 0).all()


def test_a_secret_keeps_others_out(start):
    alone = start(secret=b"secret".hex()).ready()
    alone.store(1, PROMPT, END)
    assert alone.found(2, PROMPT) == 0, "keys of hashlib are not its own"
    other = start().ready()
    assert other.found(2, PROMPT) == END
    assert set(other.loaded(2, PROMPT, END)) <= {Code.NO_SEAL, Code.MISSING}


def flip(path, byte=UNIT // 2):
    raw = bytearray(path.read_bytes())
    raw[byte] ^= 4
    path.write_bytes(raw)


def swap(path):
    path.write_bytes(file_of(path.parent, PROMPT.name(0)).read_bytes())


@pytest.mark.parametrize(("damage", "code"), [
    (flip, Code.WRONG), (lambda path: flip(path, UNIT + 50), Code.NO_SEAL), (swap, Code.ANOTHER),
    (lambda path: os.truncate(path, UNIT // 2), Code.NO_SEAL),
    (lambda path: (os.truncate(path, UNIT // 2), os.truncate(path, path.stat().st_size * 9)), Code.NO_SEAL),
    (lambda path: os.truncate(path, 0), Code.NO_SEAL),
], ids=["a bit", "a bit of the seal", "another's", "short", "short and grown", "empty"])  # fmt: skip
@pytest.mark.parametrize("part", [0, TAIL])
def test_damage_is_told_and_put_again(start, damage, code, part):
    one = start().ready()
    one.store(1, PROMPT, END)
    damage(file_of(start.folder, PROMPT.name(END - 1, part)))
    assert one.found(2, PROMPT) == END
    codes = one.loaded(2, PROMPT, END)
    assert codes[END - 1 + part] is code and codes.count(Code.OK) == ALL - 1
    for piece in PROMPT.pieces(END):
        one.units[piece.unit] = PROMPT.content(piece.key, piece.part)
    one.write(3, PROMPT.pieces(END))
    again = one.codes(Kind.STORED, 3)
    assert again[END - 1 + part] is Code.OK and again.count(Code.KNOWN) == ALL - 1
    assert one.found(4, PROMPT) == END
    assert one.loaded(4, PROMPT, END) == [Code.OK] * ALL
    one.check_units(PROMPT, END)


def test_a_key_that_goes_between_question_and_load_is_missing(start):
    one = start().ready()
    one.store(1, PROMPT, END)
    assert one.found(2, PROMPT) == END
    file_of(start.folder, PROMPT.name(2)).unlink()
    codes = one.loaded(2, PROMPT, END)
    assert codes[2] is Code.MISSING
    assert (one.units[2] == 0xA5).all()
    assert one.found(3, PROMPT) == 0


def test_a_full_disk_is_told(start):
    one = start(least_free=1 << 60).ready()
    one.write(1, PROMPT.pieces(END))
    assert one.codes(Kind.STORED, 1) == [Code.FULL] * ALL
    assert not any(path.exists() for path in files_of(start, PROMPT.pieces(END)))


def test_a_store_that_raises_is_told_and_works_again(start):
    one = start("").ready()
    obey(start, "raise")
    one.write(1, PROMPT.pieces(END))
    assert b"the store is on fire" in one.wait(Kind.OOPS, 1)[1]
    assert one.codes(Kind.STORED, 1) == [Code.FAILED] * ALL
    one.ask(2, PROMPT)
    assert b"the store is on fire" in one.wait(Kind.OOPS, 2)[1]
    assert one.wait(Kind.FOUND, 2)[0] == 0
    obey(start, "")
    one.store(3, PROMPT, END)
    assert one.found(4, PROMPT) == END
    obey(start, "raise")
    one.load(4, PROMPT.spots(END))
    one.wait(Kind.OOPS, 4)
    assert one.codes(Kind.LOADED, 4) == [Code.FAILED] * ALL
    obey(start, "")
    assert one.found(5, PROMPT) == END
    assert one.loaded(5, PROMPT, END) == [Code.OK] * ALL
    one.check_units(PROMPT, END)


def test_a_late_write_of_the_store_reaches_no_unit(start):
    one = start("").ready()
    one.store(1, PROMPT, END)
    assert one.found(2, PROMPT) == END
    obey(start, "late 0.2")
    assert one.loaded(2, PROMPT, END) == [Code.MISSING] * ALL
    time.sleep(0.4)
    assert (one.units == 0xA5).all()
    one.check_guards()


def test_a_hanging_read_holds_no_write_up_and_shows_as_no_step(start):
    one = start("").ready()
    one.store(1, PROMPT, END)
    assert one.found(2, PROMPT) == END
    obey(start, "hang 1.0")
    steps = one.words[GET // 8] + 2  # what is expected is told
    one.load(2, PROMPT.spots(END))
    eventually((start.folder / "hangs").exists)
    assert one.words[GET // 8] == steps + 1, "it is in the call"
    obey(start, "")
    puts = one.words[PUT // 8]
    one.write(3, [Piece(40, 0, Prompt(2, 1).keys[0])])
    assert one.codes(Kind.STORED, 3) == [Code.OK]
    assert one.words[GET // 8] == steps + 1 and one.words[PUT // 8] > puts
    assert one.codes(Kind.LOADED, 2) == [Code.OK] * ALL, "late, and right"
    assert one.words[GET // 8] == steps + 2
    for piece in PROMPT.pieces(END):
        assert (one.units[piece.unit] == PROMPT.content(piece.key, piece.part)).all()


def test_behind_the_reap_of_a_killed_process_nothing_is_written(start):
    one = start("").ready()
    one.store(1, PROMPT, END)
    assert one.found(2, PROMPT) == END
    obey(start, "hang 0.3")
    one.load(2, PROMPT.spots(END))
    eventually((start.folder / "hangs").exists)
    os.kill(one.pid, signal.SIGKILL)
    assert one.ends() == -signal.SIGKILL
    time.sleep(0.4)
    assert (one.units == 0xA5).all()


def test_copied_units_may_be_written_at_once(start):
    one = start("").ready()
    obey(start, "hang-put 0.2")
    pieces = PROMPT.pieces(END)
    for piece in pieces:
        one.units[piece.unit] = PROMPT.content(piece.key, piece.part)
    one.write(1, pieces)
    assert one.wait(Kind.COPIED, 1)[0] == ALL
    one.units[:] = 0xEE
    assert one.codes(Kind.STORED, 1) == [Code.OK] * ALL
    obey(start, "")
    assert one.found(2, PROMPT) == END
    assert one.loaded(2, PROMPT, END) == [Code.OK] * ALL
    one.check_units(PROMPT, END)


def test_questions_and_shorter_loads_pass_a_long_one(start):
    one = start("").ready()
    one.store(1, PROMPT, END)
    for ticket in (2, 3):
        assert one.found(ticket, PROMPT) == END
    obey(start, "hang 0.02")
    long = [Spot(unit % 60, 0, unit % END) for unit in range(20 * 16)]
    one.load(2, long)
    one.load(3, long[:32])
    one.ask(4, Prompt(9, 2))
    order = []
    while len(order) < 3:
        kind, ticket, *_ = one.receive(20)
        order.append((kind, ticket))
    assert order == [(Kind.FOUND, 4), (Kind.LOADED, 3), (Kind.LOADED, 2)]


def test_a_dropped_load_answers_early_and_writes_nothing_behind_it(start):
    one = start("").ready()
    one.store(1, PROMPT, END)
    assert one.found(2, PROMPT) == END
    obey(start, "hang 0.05")
    one.load(2, [Spot(unit % 60, 0, unit % END) for unit in range(40 * 16)])
    one.send(Kind.DROP, 2)
    codes = one.codes(Kind.LOADED, 2)
    one.units[:] = 0xA5
    assert len(codes) == 640 and codes.count(Code.MISSING) > 500
    time.sleep(0.15)
    assert (one.units == 0xA5).all()


def test_what_was_dropped_or_never_found_cannot_be_loaded(start):
    one = start().ready()
    one.store(1, PROMPT, END)
    assert one.found(2, PROMPT) == END
    one.send(Kind.DROP, 2)
    assert one.loaded(2, PROMPT, END) == [Code.FAILED] * ALL
    assert one.loaded(99, PROMPT, END) == [Code.FAILED] * ALL
    assert one.found(3, PROMPT) == END
    one.load(3, [Spot(0, 0, 7)])
    assert one.codes(Kind.LOADED, 3) == [Code.FAILED], "a page behind the prompt"
    assert (one.units == 0xA5).all()


def test_a_unit_that_is_not_there_fails_its_ticket_alone(start):
    one = start().ready()
    one.write(1, [Piece(0, 0, PROMPT.keys[0]), Piece(4096, 0, PROMPT.keys[1])])
    one.wait(Kind.OOPS, 1)
    assert one.codes(Kind.STORED, 1) == [Code.FAILED] * 2
    one.store(2, PROMPT, END)


def test_an_empty_write_and_load_are_answered(start):
    one = start().ready()
    one.write(1, [])
    assert one.codes(Kind.STORED, 1) == []
    one.store(2, PROMPT, END)
    assert one.found(3, PROMPT) == END
    one.load(3, [])
    assert one.codes(Kind.LOADED, 3) == []


# Ends

MANY = Prompt(5, 60)


def send_many(one, tickets=20):
    """Sends writes of 3 pages each and reads no answer; returns all pieces."""
    pieces = [Piece(unit, 0, key) for unit, key in enumerate(MANY.keys)]
    for piece in pieces:
        one.units[piece.unit] = MANY.content(piece.key, 0)
    for ticket in range(tickets):
        one.write(100 + ticket, pieces[3 * ticket : 3 * ticket + 3])
    return pieces


def all_written(start, pieces):
    for piece, path in zip(pieces, files_of(start, pieces), strict=True):
        assert path.exists(), "an accepted write was lost"
        assert (np.frombuffer(path.read_bytes(), np.uint8)[:UNIT] == MANY.content(piece.key, 0)).all()


def stopped(one):
    """Stops the process, so that what is sent now is found in the socket with the reason to end."""
    os.kill(one.pid, signal.SIGSTOP)
    return one


@pytest.mark.parametrize("answers", ["read", "unread"])
def test_the_end_of_the_socket_ends_it_behind_all_writes(start, answers):
    """With unread answers the socket is reset, and what was sent lies behind that error."""
    one = start().ready()
    if answers == "unread":
        one.store(1, PROMPT, END)
        one.ask(2, PROMPT)
        eventually(lambda: one.words[MAIL // 8] > one.packets)
    stopped(one)
    pieces = send_many(one)
    one.sock.close()
    os.kill(one.pid, signal.SIGCONT)
    assert one.ends() == 0
    all_written(start, pieces)


def test_the_end_of_the_scheduler_ends_it_though_the_socket_is_open(start):
    one = start(between=True).ready()
    stopped(one)
    pieces = send_many(one)
    os.kill(one.between, signal.SIGKILL)
    os.waitpid(one.between, 0)
    os.kill(one.pid, signal.SIGCONT)
    one.ends()
    all_written(start, pieces)


def test_sigterm_ends_it_behind_all_writes(start):
    one = stopped(start().ready())
    pieces = send_many(one)
    os.kill(one.pid, signal.SIGTERM)
    os.kill(one.pid, signal.SIGCONT)
    one.wait(Kind.BYE)
    assert one.ends() == 0
    all_written(start, pieces)


def test_drain_ends_it_behind_all_writes_and_without_reads(start):
    one = stopped(start().ready())
    pieces = send_many(one)
    one.send(Kind.DRAIN, count=10_000)
    os.kill(one.pid, signal.SIGCONT)
    one.wait(Kind.BYE)
    assert one.ends() == 0
    all_written(start, pieces)
    stored = [ticket for kind, ticket, *_ in one.inbox if kind is Kind.STORED]
    assert stored == list(range(100, 120))


def test_a_drain_ends_at_its_limit(start):
    one = start("").ready()
    obey(start, "hang-put 30")
    one.write(1, PROMPT.pieces(END))
    one.wait(Kind.COPIED, 1)
    began = time.monotonic()
    one.send(Kind.DRAIN, count=300)
    one.wait(Kind.BYE)
    assert one.ends() == 0
    assert 0.25 < time.monotonic() - began < 5


def test_a_hanging_read_holds_no_drain_up(start):
    one = start("").ready()
    one.store(1, PROMPT, END)
    assert one.found(2, PROMPT) == END
    obey(start, "hang 30")
    one.load(2, PROMPT.spots(END))
    eventually((start.folder / "hangs").exists)
    one.send(Kind.DRAIN, count=20_000)
    assert one.ends(10) == 0


def test_sigint_is_the_scheduler_s(start):
    one = start().ready()
    os.kill(one.pid, signal.SIGINT)
    one.store(1, PROMPT, END)


def test_a_scheduler_that_never_reads_holds_no_end_up(start):
    """Its answers fill the socket, and the threads wait in a send."""
    one = start(drain=1.0).ready()
    one.store(1, PROMPT, END)
    for ticket in range(2000):
        if not select.select([], [one.sock], [], 0.5)[1]:
            break
        one.write(ticket, PROMPT.pieces(END))
    os.kill(one.pid, signal.SIGTERM)
    assert one.ends(15) == 0


# Starts


def test_a_store_that_does_not_start_says_what_to_change(start):
    (start.folder / "file").write_bytes(b"")
    one = start(config={"file_storage_path": str(start.folder / "file" / "below")})
    said = one.wait(Kind.OOPS)[1].decode()
    assert "DSV4_STORE=file does not start: NotADirectoryError" in said and "change DSV4_STORE_CONFIG" in said
    assert one.ends() == 1


@pytest.mark.parametrize("orders", ["no", "yes"])
def test_a_store_that_fails_the_check_does_not_start(start, orders):
    one = start(orders)
    said = one.wait(Kind.OOPS)[1].decode()
    assert "at the start a block" in said and "start without DSV4_STORE" in said
    assert one.ends() == 1
    assert Kind.READY not in [kind for kind, *_ in one.inbox]


def test_a_refused_backend_says_why(start):
    one = start(backend="simm", config={})
    assert b"batch_get_v2; choose one of file, mooncake, nixl" in one.wait(Kind.OOPS)[1]
    assert one.ends() == 1


def test_a_start_that_hangs_ends_with_the_scheduler(start):
    one = start("hang-put 60")
    eventually((start.folder / "hangs").exists)
    one.sock.close()
    assert one.ends(5) == 0


def test_a_process_of_another_parent_ends_at_once(start):
    one = start(parent=os.getppid())
    assert one.ends() == 0
    assert one.receive(1) is None


def test_a_scheduler_that_dies_before_its_hello_leaves_nothing(start):
    assert start(greets=False).ends() == 0


def test_a_scheduler_that_dies_before_its_hello_ends_it_though_the_socket_is_open(start):
    one = start(between=True, greets=False)
    eventually(lambda: len(list(Path(f"/proc/{one.pid}/task").iterdir())) > 1)  # it waits for the HELLO
    os.kill(one.between, signal.SIGKILL)
    os.waitpid(one.between, 0)
    one.ends()


def test_an_arena_that_is_smaller_than_said_is_not_mapped(start):
    assert start(arena_bytes=1 << 40).ends() == 99

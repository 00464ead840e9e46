"""``sglang-dsv4 doctor --store``: two processes over one store, and what each trouble looks like."""

import json
import os
import re
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import doctor_lies
import pytest

from sglang_dsv4.cli import doctor_store, doctor_store_node
from sglang_dsv4.cli.main import main
from sglang_dsv4.engine import store_start
from sglang_dsv4.settings import read_settings
from sglang_dsv4.store import lanes
from sglang_dsv4.store.backend import FOLDER, FileBackend
from sglang_dsv4.store.wire import Code

FINE = {"disk", "secret", "start", "writes", "reads", "rates", "questions", "misses", "damage", "lifetime"}


class Here:
    """A node in this process, which imports nothing."""

    on_close = staticmethod(lambda: None)

    def __init__(self, *given):
        self.node, self.works = doctor_store_node.Node(*given), True

    def up(self):
        return self.node.about(), 0.0

    def call(self, name, *arguments):
        return getattr(self.node, name)(*arguments)

    def close(self):
        self.on_close()


@pytest.fixture
def here(monkeypatch):
    """Runs both nodes in this process."""
    monkeypatch.setattr(doctor_store, "_Node", Here)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The folder of DSV4_STORE, as an operator makes it."""
    monkeypatch.setenv("DSV4_STORE", str(tmp_path / "store"))
    (tmp_path / "store").mkdir(mode=0o700)
    return tmp_path / "store"


def found():
    """Runs the part; returns its checks by the last word of their names."""
    checks = list(doctor_store.store())
    assert all(check.todo for check in checks if check.status != "ok")
    return {check.name.removeprefix("store ") or "store": check for check in checks}


def troubles(checks):
    return {name: check.status for name, check in checks.items() if check.status != "ok"}


def test_two_processes_share_a_store_of_files_and_leave_nothing(capfd, folder, monkeypatch, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s" * 16)
    secret.chmod(0o600)
    monkeypatch.setenv("DSV4_STORE_SECRET", f"@{secret}")
    assert main(["doctor", "--json", "--store"]) == 0
    said = json.loads(capfd.readouterr().out)
    checks = {check["name"]: check for check in said["checks"]}
    assert {name.removeprefix("store ") for name in checks if name.startswith("store ")} == FINE
    assert all(checks[f"store {name}"]["status"] == "ok" for name in FINE)
    assert "BLAKE3" in checks["store secret"]["found"]
    assert "(flipped, torn, short) are found and replaced" in checks["store damage"]["found"]
    put, get, write, read = map(float, re.findall(r"\d+\.\d+", checks["store rates"]["found"]))
    session = (256 + 5) * 999_424 / 1e9
    assert write * put == pytest.approx(session, rel=0.1) and read * get == pytest.approx(session, rel=0.1)
    assert list(folder.iterdir()) == []


def test_without_the_option_nothing_is_tried(folder, monkeypatch, capsys):
    monkeypatch.setattr(doctor_store, "store", lambda: pytest.fail("it was tried"))
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


@pytest.mark.parametrize(("environ", "text"), [
    ({}, "DSV4_STORE is not set"),
    ({"DSV4_STORE": "eic"}, "it has no batch_get_v2"),
    ({"DSV4_STORE": "shm"}, "it keeps nothing"),
    ({"DSV4_STORE": "nosuch"}, "there is no such backend"),
    ({"DSV4_STORE": "file"}, "needs a folder"),
    ({"DSV4_STORE": "dynamic", "DSV4_STORE_CONFIG": '{"class_name": "A"}'}, "needs backend_name, module_path"),
    ({"DSV4_STORE": "mooncake", "DSV4_STORE_CONFIG": '{"standalone_storage": true}'}, "standalone_storage"),
    ({"DSV4_STORE": "/proc/nosuch"}, "cannot be made"),
    ({"DSV4_STORE": "/dev/null/store"}, "cannot be made"),
    ({"DSV4_STORE": "/tmp/one", FOLDER: "/tmp/other"}, "would come before it"),
])  # fmt: skip
def test_what_cannot_be_a_store_fails_before_a_process_starts(monkeypatch, environ, text):
    monkeypatch.setattr(doctor_store, "_Node", lambda *_: pytest.fail("a process was started"))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    (check,) = found().values()
    assert check.status == "fail" and text in check.found


def test_bad_settings_have_their_own_finding(monkeypatch):
    monkeypatch.setenv("DSV4_STORE", "relative/folder")
    assert found() == {}


def test_a_folder_that_others_use_is_warned_of(here, folder, monkeypatch, tmp_path):
    folder.chmod(0o750)
    secret = tmp_path / "secret"
    secret.write_text("s" * 16)
    secret.chmod(0o644)
    monkeypatch.setenv("DSV4_STORE_SECRET", f"@{secret}")
    monkeypatch.setenv("DSV4_SESSIONS", "off")
    monkeypatch.setenv("DSV4_STORE_CONFIG", '{"max_size": "2T"}')
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    checks = found()
    assert troubles(checks) == {"store": "warn", "folder": "warn", "folder's mode": "warn", "secret": "warn"}
    assert "mode 750" in checks["folder's mode"].found and "chown 4711" in checks["folder"].todo
    assert str(secret) in checks["secret"].todo and "at most 2T are used" in checks["disk"].found


def test_a_disk_without_room_fails_though_the_store_works(here, folder, monkeypatch):
    monkeypatch.setattr(store_start, "least_free", lambda _: 1 << 60)
    monkeypatch.setenv("DSV4_STORE_CONFIG", '{"min_free_space": "0"}')
    checks = found()
    assert troubles(checks) == {"disk": "fail"} and "nothing is written" in checks["disk"].found
    assert checks["disk"].breaks.startswith("sessions in a store")


def test_where_the_engine_evicts_for_the_floor_a_full_disk_is_warned_of(folder, monkeypatch):
    """A server's own floor is a tenth of a small disk."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=80 << 30))
    monkeypatch.setenv("DSV4_STORE", str(folder))
    config = store_start.config_of(read_settings())
    disk = SimpleNamespace(f_bavail=9 << 18, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    assert "until 8.0 GiB are free, then old sessions go" in doctor_store._disk(folder, "", config, 8 << 30).found
    disk.f_bavail = 7 << 18
    check = doctor_store._disk(folder, "", config, 8 << 30)
    assert (check.status, check.breaks) == ("warn", "") and "old sessions go until 8.0 GiB are free" in check.found
    check = doctor_store._disk(folder, "", {"min_free_space": "5G"}, 8 << 30)
    assert check.status == "ok" and "until 5G are free, then old sessions go" in check.found


def test_a_variable_of_the_engine_that_comes_first_is_told(here, monkeypatch, tmp_path):
    monkeypatch.setenv("DSV4_STORE", "file")
    monkeypatch.setenv("DSV4_STORE_CONFIG", json.dumps({"file_storage_path": str(tmp_path / "given")}))
    monkeypatch.setenv(FOLDER, str(tmp_path / "other"))
    checks = found()
    assert troubles(checks) == {"folder": "warn"} and str(tmp_path / "other") in checks["folder"].found
    assert (tmp_path / "other").is_dir() and str(tmp_path / "other") in checks["disk"].found
    assert "then nothing is written" in checks["disk"].found


# ------------------------------------------------------------------------------------------------- stores that lie


@contextmanager
def dynamic(monkeypatch, tmp_path, name, order="ok"):
    """A store of a class of ``doctor_lies``."""
    orders = tmp_path / "orders"
    orders.write_text(order)
    config = {"backend_name": name, "module_path": "doctor_lies", "class_name": name, "orders": str(orders)}
    monkeypatch.setenv("DSV4_STORE", "dynamic")
    monkeypatch.setenv("DSV4_STORE_CONFIG", json.dumps(config))
    doctor_lies.Shared.everything.clear()
    yield orders
    doctor_lies.Shared.everything.clear()


def test_a_store_that_cannot_be_asked_or_told_to_remove_is_fine_but_slow_to_ask(here, monkeypatch, tmp_path):
    with dynamic(monkeypatch, tmp_path, "Shared"):
        first = found()
        count = len(doctor_lies.Shared.everything)
        again = found()
        assert len(doctor_lies.Shared.everything) == count, "what cannot be removed has always the same names"
    assert troubles(first) == troubles(again) == {"secret": "warn", "questions": "warn"}
    assert "(flipped, torn) are found and replaced" in first["damage"].found


def test_what_another_process_does_not_find_fails(here, monkeypatch, tmp_path):
    with dynamic(monkeypatch, tmp_path, "Shared"):
        monkeypatch.setattr(doctor_lies.Shared, "__init__", doctor_lies.Lying.__init__)  # each has its own
        checks = found()
    assert troubles(checks) == {"secret": "warn", "reads": "fail"}
    assert checks["reads"].found == "48 of 48 objects are not read elsewhere (48 missing)"
    assert list(checks)[-1] == "reads", "the rest would say the same"


def test_damage_that_stays_is_warned_of(here, monkeypatch, tmp_path):
    with dynamic(monkeypatch, tmp_path, "KeepsTheFirst"):
        checks = found()
    assert checks["damage"].status == "warn" and "not replaced (flipped, torn)" in checks["damage"].found


def test_what_goes_with_its_process_is_warned_of(here, monkeypatch, tmp_path):
    monkeypatch.setattr(Here, "on_close", doctor_lies.Shared.everything.clear)
    with dynamic(monkeypatch, tmp_path, "Shared"):
        checks = found()
    assert checks["lifetime"].status == "warn"
    assert checks["lifetime"].found == "48 of 48 objects went with the process that put them"


def test_a_store_that_raises_is_quoted(here, monkeypatch, tmp_path):
    with dynamic(monkeypatch, tmp_path, "Shared") as orders:
        up = Here.up

        def burn(self):
            said = up(self)
            orders.write_text("raise")
            return said

        monkeypatch.setattr(Here, "up", burn)
        checks = found()
    assert troubles(checks) == {"secret": "warn", "writes": "fail", "reads": "fail"}
    assert all("the store is on fire" in checks[name].found for name in ("writes", "reads"))


def test_a_store_that_says_that_it_has_everything_fails(here, folder, monkeypatch):
    told = FileBackend.exists
    monkeypatch.setattr(
        FileBackend, "exists", lambda self, names: [True, True] if len(names) == 2 else told(self, names)
    )
    checks = found()
    assert troubles(checks) == {"questions": "fail"} and "it says True and True" in checks["questions"].found


def test_a_window_that_is_not_found_fails(here, folder, monkeypatch):
    monkeypatch.setattr(lanes.Lanes, "ask", lambda *_: 0)
    checks = found()
    assert troubles(checks) == {"questions": "fail"} and "0 of 43 pages" in checks["questions"].found


def test_what_comes_back_wrong_and_is_said_to_be_right_fails(here, folder, monkeypatch):
    told = doctor_store_node.Node.get

    def spoilt(self, word):
        monkeypatch.setattr(doctor_store_node, "_content", lambda name: self._units[0] ^ 1)
        return told(self, word)

    monkeypatch.setattr(doctor_store_node.Node, "get", spoilt)
    checks = found()
    assert "48 of 48 objects came back wrong, unnoticed" in checks["reads"].found


def test_seals_that_are_not_looked_at_fail(here, folder, monkeypatch):
    monkeypatch.setattr(lanes, "check", lambda *_: Code.OK)
    checks = found()
    assert troubles(checks) == {"damage": "fail"} and "(flipped, torn)" in checks["damage"].found


def test_a_segment_of_the_server_and_an_open_address_are_warned_of():
    addresses = {"master_server_address": "0.0.0.0:50051", "metadata_server": "P2PHANDSHAKE", "local_hostname": ""}
    segment, address = doctor_store._places({"segment": 4 << 30, "addresses": addresses})
    assert segment.status == address.status == "warn"
    assert "4.0 GiB" in segment.found and '"global_segment_size": 0' in segment.todo
    assert address.found == "master_server_address is 0.0.0.0:50051"
    assert not list(doctor_store._places({"segment": 0, "addresses": {"master_server_address": "10.0.0.5:50051"}}))


# ---------------------------------------------------------------------------------------------- processes that fail


@pytest.mark.parametrize(("program", "text"), [
    ("import time; time.sleep(60)", "does not answer within 0 s (start)"),
    ("raise SystemExit('its last words')", "the process of the store ended (start)"),
])  # fmt: skip
def test_a_process_that_does_not_start_fails_and_is_ended(capsys, folder, monkeypatch, program, text):
    monkeypatch.setattr(doctor_store, "COMMAND", (sys.executable, "-c", program))
    monkeypatch.setattr(doctor_store, "START", 0.3 if "sleep" in program else 20)
    monkeypatch.setattr(doctor_store, "END", 0.1)
    started = time.monotonic()
    checks = found()
    assert time.monotonic() - started < 30, "it was waited for, and not ended"
    assert troubles(checks) == {"store": "fail"} and text in checks["store"].found
    assert ("its last words" in capsys.readouterr().err) == ("words" in program)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert not [pid for pid in children if "time.sleep(60)" in Path(f"/proc/{pid}/cmdline").read_text()]

"""NIXL's POSIX files: what they promise, and damage that its class does not see."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from store_conformance import Conformance, check_replaced
from store_node import UNIT, Node, pages

from sglang_dsv4.store.wire import Code


def why_missing() -> str | None:
    try:
        import nixl._api  # noqa: F401
    except ImportError as error:
        return f"nixl cannot be imported: {error}; .ci/install-mooncake"
    return None


MISSING = why_missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

FOLDER = "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"
POSIX = {"plugin": {"posix": {"active": True}}, "l3_cleaner_enabled": False}


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Nodes are forked, and find the engine's class imported."""
    import sglang.srt.mem_cache.storage.nixl.hicache_nixl  # noqa: F401


@pytest.fixture(scope="class", params=[False, True], ids=["buffered", "direct"])
def config(request):
    return POSIX | {"use_direct_io": request.param}


@pytest.fixture(scope="class")
def folder(tmp_path_factory, config):
    folder = tmp_path_factory.mktemp("nixl")
    if config["use_direct_io"]:
        try:
            os.close(os.open(folder / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
        except OSError:
            pytest.skip(f"the file system of {folder} knows no O_DIRECT")
    return folder


class TestConformance(Conformance):
    @pytest.fixture(scope="class")
    def nodes(self, folder, config):
        with ExitStack() as stack:
            yield lambda **more: stack.enter_context(Node("nixl", config, {FOLDER: str(folder)}, **more))

    @pytest.mark.parametrize("nbytes", [0, 1, UNIT // 2, UNIT])
    def test_a_file_that_is_too_short_is_damage_and_is_replaced(self, writer, reader, folder, nbytes):
        """An empty one is what a write leaves that failed, as on a full disk."""
        things = pages(f"short {nbytes}", 20)
        writer.call("put", things)
        os.truncate(file_of(folder, things[1]), nbytes)
        assert reader.call("exists", things) == [True] * 20
        check_replaced(reader, writer, things, Code.NO_SEAL)

    def test_a_file_that_grew_is_read_as_it_was(self, writer, reader, folder):
        things = pages("grown", 3)
        writer.call("put", things)
        path = file_of(folder, things[1])
        os.truncate(path, 2 * path.stat().st_size)
        assert reader.call("get", things) == [Code.OK] * 3

    def test_a_file_that_was_cut_and_grew_again_is_damage(self, writer, reader, folder):
        things = pages("holed", 3)
        writer.call("put", things)
        path = file_of(folder, things[1])
        size = path.stat().st_size
        os.truncate(path, UNIT // 2)
        os.truncate(path, size)
        check_replaced(reader, writer, things, Code.NO_SEAL)

    def test_one_missing_key_fails_no_other(self, writer, reader, folder):
        things = pages("absent", 16)
        writer.call("put", things)
        file_of(folder, things[15]).unlink()
        assert reader.call("get", things) == [*[Code.OK] * 15, Code.MISSING]

    def test_a_writer_killed_in_the_midst_costs_its_own_objects_alone(self, writer, reader, nodes):
        things = pages("killed", 48)
        with nodes() as doomed:
            doomed.begin("put", things)
            doomed.process.kill()
        codes = reader.call("get", things)
        assert set(codes) <= {Code.OK, Code.MISSING, Code.NO_SEAL, Code.WRONG}
        for _ in things:  # each read finds the first bad one of a batch of 16
            reader.call("put", things)
            if set(reader.call("get", things)) == {Code.OK}:
                break
        assert writer.call("get", things) == [Code.OK] * 48


def file_of(folder: Path, thing) -> Path:
    (path,) = (path for path in folder.rglob("*") if path.is_file() and thing.name in path.name)
    return path

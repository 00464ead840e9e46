"""The engine's own backends behind ours: files on the disk, what is refused, and the check at the start."""

import os
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import lying_backend
import numpy as np
import psutil
import pytest

from sglang_dsv4.store import backend as module
from sglang_dsv4.store.backend import BackendUnfit, make_backend, start_check, why_not
from sglang_dsv4.store.lanes import Lanes
from sglang_dsv4.store.ring import Ring
from sglang_dsv4.store.wire import Code, Piece

UNIT, SLOTS = 8192, 8
NAMES = ["ab" * 32 + "p", "ab" * 32 + "w0", "cd" * 32 + "p"]
FILES = [f"{name}.deepseek_v4_c4_org-model.bin" for name in NAMES]  # as both releases call them
STRIDE = 12288


@pytest.fixture
def ring():
    ring = Ring(UNIT, SLOTS)
    for slot in range(SLOTS):
        ring.slot(slot)[:] = np.random.default_rng(slot).integers(0, 256, ring.stride, np.uint8)
    return ring


@pytest.fixture
def made(ring, tmp_path, monkeypatch):
    """Makes the backend of files."""
    monkeypatch.delenv(module.FOLDER, raising=False)
    folder = tmp_path / "store"

    def make(least_free=0, ring=ring, **config):
        return make_backend("file", {"file_storage_path": str(folder), **config}, "org/model", ring, least_free)

    return SimpleNamespace(make=make, folder=folder, ring=ring)


def written(made):
    backend = made.make()
    assert backend.put(NAMES, [0, 1, 2], "group") == [True] * 3
    return backend


def test_the_ring_is_a_pool_of_aligned_slots(ring):
    assert ring.stride == STRIDE and ring.is_stride_page_aligned(4096)
    import torch

    pointers, sizes = ring.get_page_buffer_meta(torch.tensor([2, 5]))
    assert pointers == [ring.slot(slot).__array_interface__["data"][0] for slot in (2, 5)] and sizes == [STRIDE] * 2
    (whole,) = ring.get_hybrid_pool_buffer()
    assert (whole.numpy().reshape(SLOTS, STRIDE)[3] == ring.slot(3)).all()
    ring.slot(3)[7] = 1 + ring.slot(3)[7]
    assert (ring.get_data_page(3).numpy() == ring.slot(3)).all()
    assert ring.payload(3).nbytes == UNIT and np.shares_memory(ring.seal(3), ring.slot(3))


def test_a_page_for_a_read_is_the_slot_that_was_aimed_at_once(ring):
    ring.aim(4)
    page = ring.get_dummy_flat_data_page()
    assert page.data_ptr() == ring.get_data_page(4).data_ptr()
    assert ring.get_dummy_flat_data_page().data_ptr() not in {ring.get_data_page(slot).data_ptr() for slot in range(8)}
    page = ring.get_dummy_flat_data_page()
    page.fill_(9)
    ring.set_from_flat_data_page(5, page)
    assert (ring.slot(5) == 9).all()


def test_a_process_for_files_imports_nothing_of_models():
    """They are most of the time in which a server has no store after its process died."""
    program = (
        "import sys\nfrom sglang_dsv4.store.backend import import_engine\nimport_engine('file')\n"
        "from sglang.srt.mem_cache.hicache_storage import HiCacheFile\n"
        "assert not {'transformers', 'sglang.lang', 'sglang.srt.managers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_files_have_the_bytes_of_the_slots_and_come_back(made):
    backend, wanted = written(made), [made.ring.slot(slot).copy() for slot in range(3)]
    assert sorted(path.name for path in made.folder.iterdir()) == sorted(FILES)
    for file, slot in zip(FILES, wanted, strict=True):
        assert (made.folder / file).read_bytes() == slot.tobytes()
    for slot in range(SLOTS):
        made.ring.slot(slot)[:] = 0xA5
    assert backend.get(NAMES, [7, 6, 5]) == [Code.OK] * 3
    for slot, bytes_ in zip((7, 6, 5), wanted, strict=True):
        assert (made.ring.slot(slot) == bytes_).all()
    assert (made.ring.slot(0) == 0xA5).all() and (made.ring.slot(4) == 0xA5).all()


def test_files_are_read_straight_into_the_slots(made, monkeypatch):
    backend, targets = written(made), []
    get = backend.inner.get
    monkeypatch.setattr(backend.inner, "get", lambda key, page: targets.append(page.data_ptr()) or get(key, page))
    backend.get(NAMES, [7, 6, 5])
    assert sorted(targets) == [made.ring.get_data_page(slot).data_ptr() for slot in (5, 6, 7)]


def test_files_are_read_several_at_a_time(made, monkeypatch):
    backend, both = written(made), threading.Barrier(len(NAMES))
    get = backend.inner.get
    monkeypatch.setattr(backend.inner, "get", lambda key, page: (both.wait(20), get(key, page))[1])
    assert backend.get(NAMES, [7, 6, 5]) == [Code.OK] * 3
    assert all((made.ring.slot(7 - at) == made.ring.slot(at)).all() for at in range(3))


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_without_threads_files_are_read_one_at_a_time(made, monkeypatch, caplog, allowed):
    start, started = threading.Thread.start, []

    def limited(thread):
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    backend = written(made)
    assert [record.getMessage() for record in caplog.records if "one at a time" in record.message]
    assert backend.get(NAMES, [7, 6, 5]) == [Code.OK] * 3
    for thread in started:
        thread.join(20)
        assert not thread.is_alive()


def test_files_that_are_expected_are_read_ahead(made, monkeypatch):
    backend, asked = written(made), []
    advise = os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *how: asked.append((os.fstat(fd).st_ino, how)))
    before = psutil.Process().num_fds()
    backend.expect([NAMES[2], "ef" * 32 + "p", NAMES[0]])  # the second one went meanwhile
    inodes = [(made.folder / FILES[at]).stat().st_ino for at in (2, 0)]
    assert asked == [(inode, (0, 0, os.POSIX_FADV_WILLNEED)) for inode in inodes]
    assert psutil.Process().num_fds() == before
    monkeypatch.setattr(os, "posix_fadvise", advise)
    backend.expect(NAMES)
    assert backend.get(NAMES, [3, 4, 5]) == [Code.OK] * 3


def test_another_process_finds_them(made):
    written(made)
    other = made.make(ring=Ring(UNIT, SLOTS))
    assert other.exists([*NAMES, "ef" * 32 + "p"]) == [True, True, True, False]
    assert other.get(NAMES[:1], [3]) == [Code.OK]
    assert (other.ring.slot(3) == made.ring.slot(0)).all()


def test_a_missing_a_short_and_an_unreadable_file_spoil_no_other(made, monkeypatch):
    backend = written(made)
    (made.folder / FILES[1]).unlink()
    assert backend.get(NAMES, [3, 4, 5]) == [Code.OK, Code.MISSING, Code.OK]
    (made.folder / FILES[0]).write_bytes(b"short")
    assert backend.get(NAMES, [3, 4, 5]) == [Code.NO_SEAL, Code.MISSING, Code.OK]

    def refuse(*_):
        raise PermissionError(13, "another user's")

    monkeypatch.setattr(backend.inner, "get", refuse)
    assert backend.get(NAMES[2:], [5]) == [Code.FAILED]


@pytest.mark.parametrize("config", [{}, {"enable_metadata_cache": True, "metadata_ttl": 60.0}, {"max_size": 10**9}])
def test_what_was_removed_is_gone_and_can_be_put_anew(made, config):
    backend = made.make(**config)
    backend.put(NAMES, [0, 1, 2], "")
    (made.folder / FILES[0]).write_bytes(bytes(STRIDE))
    assert backend.put(NAMES[:1], [0], "") == [True], "the engine keeps what is there"
    assert (made.folder / FILES[0]).read_bytes() == bytes(STRIDE)
    assert backend.remove(NAMES[0]) and not (made.folder / FILES[0]).exists()
    assert backend.exists(NAMES) == [False, True, True]
    if "max_size" in config:
        assert backend.inner._evictor._total_bytes == 2 * STRIDE, "a removed file is not counted"
    assert backend.put(NAMES[:1], [0], "") == [True]
    assert (made.folder / FILES[0]).read_bytes() == made.ring.slot(0).tobytes()
    assert backend.remove("ef" * 32 + "p"), "what is not there"


def test_a_file_that_cannot_be_removed_is_told(made, monkeypatch):
    backend = written(made)

    def refuse(*_, **__):
        raise PermissionError(1, "a sticky folder")

    monkeypatch.setattr(type(made.folder), "unlink", refuse)
    assert not backend.remove(NAMES[0])


def test_what_is_asked_for_is_evicted_last(made):
    backend = made.make(max_size=3 * STRIDE, eviction_ratio=1.0)
    backend.put(NAMES, [0, 1, 2], "")
    backend.exists(NAMES[:1])
    backend.put(["ef" * 32 + "p"], [3], "")
    assert backend.exists(NAMES) == [True, False, True]


def test_a_disk_keeps_its_free_bytes(made, monkeypatch):
    free = SimpleNamespace(f_bavail=100, f_frsize=4096, f_blocks=1000)
    backend = made.make(least_free=50 * 4096)
    monkeypatch.setattr(os, "statvfs", lambda path: free)
    assert backend.room(50 * 4096) and not backend.room(50 * 4096 + 1)
    assert made.make().room(1 << 60), "nothing was asked for"
    evicts = made.make(least_free=50 * 4096, min_free_space=60 * 4096)
    assert evicts.room(1 << 60), "the engine's own eviction keeps more free"
    assert made.make(least_free=200 * 4096, min_free_space=60 * 4096).room(1 << 60), "an operator's floor is lower"


@pytest.mark.parametrize(("free", "code"), [(49, Code.FULL), (60, Code.OK)])
def test_a_put_that_the_engine_has_no_room_for_tells_a_full_store(made, monkeypatch, free, code):
    """Without room is not failed: reads go on, and nothing rests."""
    backend = made.make(least_free=200 * STRIDE, min_free_space=50 * STRIDE)
    disk = SimpleNamespace(f_bavail=free * STRIDE // 4096, f_frsize=4096, f_blocks=1 << 20)
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    lanes = Lanes(np.zeros(8 * UNIT, np.uint8), UNIT, 2, backend, backend.ring, None, lambda lane: None)
    assert [*lanes.put(b"g" * 32, [Piece(0, 0, b"k" * 32)], lambda count: None)][-1] == [code]


def test_halves_of_killed_writers_are_swept(made):
    made.folder.mkdir()
    old, young, other = (made.folder / name for name in (".aa.tmp", ".bb.tmp", "cc.bin"))
    for path in (old, young, other):
        path.write_bytes(b"half")
    for path in (old, other):
        os.utime(path, (time.time() - 7200,) * 2)
    made.make()
    assert not old.exists() and young.exists() and other.exists()


def test_the_folder_of_the_engine_s_variable_is_used(made, tmp_path, monkeypatch):
    monkeypatch.setenv(module.FOLDER, str(tmp_path / "elsewhere"))
    assert made.make().folder == tmp_path / "elsewhere"
    assert why_not("file", {}) is None


@pytest.mark.parametrize(("name", "config", "said"), [
    ("eic", {}, "batch_get_v2"), ("simm", {}, "batch_get_v2"), ("tensorcast", {}, "pools"), ("aibrix", {}, "ranks"),
    ("shm", {}, "keeps nothing"), ("sim", {}, "no bytes"), ("flexkv", {}, "no such backend"),
    ("file", {}, "file_storage_path"), ("mooncake", {"standalone_storage": True}, "standalone_storage"),
    ("dynamic", {"class_name": "X"}, "backend_name, module_path"),
])  # fmt: skip
def test_what_is_refused_says_why_and_what_to_change(name, config, said, ring, monkeypatch):
    monkeypatch.delenv(module.FOLDER, raising=False)
    assert said in why_not(name, config) and f"DSV4_STORE={name}" in why_not(name, config)
    with pytest.raises(BackendUnfit, match=re.escape(why_not(name, config))):
        make_backend(name, config, "m", ring)


@pytest.mark.parametrize("name", ["hf3fs", "mori", "npu_memcache", "seaweedfs", "nixl", "mooncake"])
def test_the_others_may_be_tried(name):
    assert why_not(name, {}) is None


def test_every_backend_of_the_engine_is_taken_or_refused():
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    assert set(StorageBackendFactory._registry) == set(module.REFUSED) | set(module.TAKEN) - {"dynamic"}


@pytest.mark.parametrize("lost", module.FileBackend.needs)
def test_a_release_without_a_name_that_is_needed_is_refused(made, monkeypatch, lost):
    monkeypatch.setattr(module.FileBackend, "needs", (*module.FileBackend.needs, lost + "_of_old"))
    with pytest.raises(BackendUnfit, match=f"HiCacheFile of this release of sglang has no {lost}_of_old"):
        made.make()


def lying(ring, folder, orders="", name="Lying"):
    (folder / "orders").write_text(orders)
    config = {"backend_name": "lying", "module_path": lying_backend.__name__, "class_name": name}
    return make_backend("dynamic", {**config, "orders": str(folder / "orders")}, "m", ring)


def test_a_class_without_the_second_interface_is_refused(ring, tmp_path):
    with pytest.raises(BackendUnfit, match="OnlyOld of this release of sglang has no batch_get_v2"):
        lying(ring, tmp_path, name="OnlyOld")


def test_an_operator_s_class_is_asked_by_reading(ring, tmp_path):
    backend = lying(ring, tmp_path)
    assert backend.exists(NAMES) is None and not backend.can_remove
    assert backend.put(NAMES, [0, 1, 2], "") == [True] * 3
    assert backend.get([NAMES[1], "ef" * 32 + "p"], [4, 5]) == [Code.OK, Code.MISSING]
    assert (ring.slot(4) == ring.slot(1)).all()


@pytest.mark.parametrize("call", ["put", "get"])
def test_too_few_answers_are_no_answers(ring, tmp_path, call):
    backend = lying(ring, tmp_path, "fewer")
    with pytest.raises(BackendUnfit, match="2 answers to 3 keys"):
        backend.put(NAMES, [0, 1, 2], "") if call == "put" else backend.get(NAMES, [0, 1, 2])


def test_the_engine_s_injector_of_faults_is_looked_through(made, monkeypatch):
    storage = pytest.importorskip("sglang.srt.mem_cache.hicache_storage")
    if not hasattr(storage, "HiCacheStorageFailureInjector"):
        pytest.skip("this release has none")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "1.0")
    backend = made.make()
    assert type(backend.engine).__name__ == "HiCacheStorageFailureInjector"
    assert backend.put(NAMES, [0, 1, 2], "") == [False] * 3
    assert backend.exists(NAMES) == [False] * 3
    assert backend.get(NAMES, [0, 1, 2]) == [Code.MISSING] * 3


# The check at the start


def test_a_backend_that_works_passes_and_keeps_nothing(made):
    backend = made.make()
    start_check(backend)
    assert not list(made.folder.iterdir())


def test_one_that_cannot_remove_keeps_one_block_for_all_starts(ring, tmp_path):
    backend = lying(ring, tmp_path)
    start_check(backend)
    start_check(backend)
    assert len(backend.inner.objects) == 1


@pytest.mark.parametrize(
    ("orders", "said"), [("no", "could not be put"), ("yes", "came back changed"), ("late 0", "could not be read")]
)
def test_one_that_lies_does_not_pass(ring, tmp_path, orders, said):
    with pytest.raises(BackendUnfit, match=f"DSV4_STORE=dynamic: at the start a block.*{said}.*start without"):
        start_check(lying(ring, tmp_path, orders))


@pytest.mark.parametrize(("method", "answer", "said"), [
    ("exists", lambda names: [False] * len(names), "is not there"),
    ("exists", lambda names: [True] * len(names), "is still there"),
    ("remove", lambda name: False, "could not be removed"),
])  # fmt: skip
def test_one_that_cannot_find_or_remove_does_not_pass(made, monkeypatch, method, answer, said):
    backend = made.make()
    monkeypatch.setattr(backend, method, answer)
    with pytest.raises(BackendUnfit, match=f"{said}; check owner, mode and free space of {made.folder}"):
        start_check(backend)


def test_a_folder_that_became_unwritable_does_not_pass(made):
    backend = made.make()
    made.folder.rmdir()
    with pytest.raises(BackendUnfit, match="could not be put"):
        start_check(backend)


class PlayedNixl:
    """Without the library, the engine's class is asked key by key: one missing or empty key fails its batch."""

    file_manager = None

    def __init__(self):
        self.objects = {}

    def register_mem_pool_host(self, pool):
        pass

    def register_mem_host_pool_v2(self, pool, name):
        self.pool = pool

    def _get_component_keys(self, names, pool):
        return [f"{name}_model_{pool}" for name in names]

    def _query_keys_exist(self, keys):
        return [key in self.objects for key in keys]

    def batch_set_v2(self, transfers):
        for key, slot in zip(transfers[0].keys, transfers[0].host_indices.tolist(), strict=True):
            self.objects[f"{key}_model_deepseek_v4_c4"] = bytes(self.pool.slot(slot))
        return {transfers[0].name: [True] * len(transfers[0].keys)}

    def batch_get_v2(self, transfers):
        raws = [self.objects.get(f"{key}_model_deepseek_v4_c4") for key in transfers[0].keys]
        if all(raws):
            for raw, slot in zip(raws, transfers[0].host_indices.tolist(), strict=True):
                self.pool.slot(slot)[:] = np.frombuffer(raw, np.uint8)
        return {transfers[0].name: [all(raws)] * len(raws)}


def test_a_batch_that_one_key_fails_is_read_key_by_key(ring):
    engine = PlayedNixl()
    backend = module.NixlBackend("nixl", engine, ring, 0)
    backend.put(NAMES, [0, 1, 2], "")
    assert backend.get([NAMES[0], "ef" * 32 + "p", NAMES[2]], [3, 4, 5]) == [Code.OK, Code.MISSING, Code.OK]
    assert (ring.slot(3) == ring.slot(0)).all() and (ring.slot(5) == ring.slot(2)).all()
    engine.objects[f"{NAMES[1]}_model_deepseek_v4_c4"] = b""
    assert backend.get(NAMES, [3, 4, 5]) == [Code.OK, Code.NO_SEAL, Code.OK]
    engine.objects.clear()
    assert backend.get(NAMES, [3, 4, 5]) == [Code.MISSING] * 3

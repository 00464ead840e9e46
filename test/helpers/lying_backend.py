"""A backend of the engine that keeps objects in memory and lies, hangs or raises as a file says; for ``dynamic``."""

import threading
import time
from pathlib import Path

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage


class Lying(HiCacheStorage):
    """Reads ``extra_config["orders"]`` before each call: a word, and a number behind some.

    raise | hang SECONDS (gets), hang-put SECONDS | yes (says that it read, and did not) | no (puts nothing) |
    fewer (answers for all but one) | late SECONDS (says that it could not read, and writes into the slots later)
    """

    def __init__(self, storage_config, _):
        self.orders = Path(storage_config.extra_config["orders"])
        self.objects: dict[str, bytes] = {}

    def _order(self):
        word, _, number = self.orders.read_text().partition(" ")
        return word, float(number or 0)

    def _hang(self, seconds):
        """Shows that the orders were read, by a file beside them."""
        self.orders.with_name("hangs").touch()
        time.sleep(seconds)

    def batch_set_v2(self, transfers, extra_info=None):
        (one,) = transfers
        word, seconds = self._order()
        if word == "raise":
            raise RuntimeError("the store is on fire")
        if word == "hang-put":
            self._hang(seconds)
        done = [word != "no"] * len(one.keys)
        pool = self.registered_pools[one.name]
        for key, slot, ok in zip(one.keys, one.host_indices.tolist(), done, strict=True):
            if ok:
                self.objects[key] = bytes(pool.get_data_page(slot).numpy())
        return {one.name: done[1:] if word == "fewer" else done}

    def batch_get_v2(self, transfers, extra_info=None):
        (one,) = transfers
        word, seconds = self._order()
        slots = one.host_indices.tolist()
        if word == "raise":
            raise RuntimeError("the store is on fire")
        if word == "yes":
            return {one.name: [True] * len(slots)}
        if word == "hang":
            self._hang(seconds)
        pool = self.registered_pools[one.name]
        if word == "late":
            threading.Timer(seconds, lambda: [pool.get_data_page(slot).fill_(0xEE) for slot in slots]).start()
            return {one.name: [False] * len(slots)}
        found = [self.objects.get(key) for key in one.keys]
        for slot, raw in zip(slots, found, strict=True):
            if raw is not None:
                pool.get_data_page(slot).numpy()[:] = memoryview(raw)
        return {one.name: [raw is not None for raw in found][1 if word == "fewer" else 0 :]}

    def exists(self, key):
        raise NotImplementedError

    get = set = batch_get = batch_set = batch_exists = exists


class OnlyOld(Lying):
    """Has the calls of the first interface alone."""

    batch_get_v2 = HiCacheStorage.batch_get_v2

"""Times a save and a load of one request by ranks that share an arena, against one alone.

    python3 -m benchmarks.node_transfer [--devices 0,1,2,3] [--tokens 65535] [--name NAME] [--out FOLDER]

A process with real pools on each of --devices; ``0,0`` puts two on one card, whose link they then share. Of a save each
has its part of the bytes, of a load all of them. Rank 0 alone and all together take turns, and so do plain pinned
copies of as many bytes, which tell what the links give at once. A row names each rank's time, and how much of a save
the host takes to enqueue it and to agree with the others. About a minute with a warm JIT cache. Without a GPU:
--devices cpu,cpu --layers tiny, which shows no speed.
"""

import argparse
import multiprocessing
import queue
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from sglang_dsv4.bench import results

SPAWN = multiprocessing.get_context("spawn")
WARM = 3
# Of one rank's save, and its load by theirs; by the number of ranks with a link each.
SAVE, LOAD = {2: 0.6, 4: 0.35}, {2: 0.97, 4: 1 / 1.05}


class Rank:
    """Runs one process: a pool with two services, one alone and one that shares its arena with the other ranks'."""

    def __init__(self, rank: int, arguments: argparse.Namespace) -> None:
        from sglang_dsv4.testing.standalone import FLASH_RATIOS, TINY_RATIOS, boot, install_hooks  # noqa: PLC0415

        boot()  # before the engine's pools are imported, in each process for itself
        from sglang_dsv4.bench.subject import Subject  # noqa: PLC0415
        from sglang_dsv4.hostmem.sharing import World  # noqa: PLC0415
        from sglang_dsv4.pools.copy_service import ServerContext  # noqa: PLC0415
        from sglang_dsv4.settings import Settings  # noqa: PLC0415

        self.rank, self.tokens = rank, arguments.tokens
        devices = arguments.devices.split(",")
        self.ranks, device = len(devices), devices[rank]
        if device != "cpu":
            torch.cuda.set_device(int(device))
            device = "cuda"
        install_hooks()
        ratios = FLASH_RATIOS if arguments.layers == "flash" else TINY_RATIOS
        pages = 2 * -(-self.tokens // 256) + 8
        self.subject = Subject(ratios, pages, device)
        torch.manual_seed(7)  # the ranks hold the same cache
        for buffers in self.subject.host.buffers.buffers.values():
            for buffer in buffers:
                buffer.random_(0, 256)
        self.alone, self.subject.pool.host = self.subject.host, None
        context = ServerContext(
            agreed_size=lambda size: size and size.agreed(self.gather(size)), ranks=self.ranks,
            world=World(self.gather, rank, "all"),
        )  # fmt: skip
        settings = Settings(host_gb=pages * 1.6e6 / 2**30 + 0.4)
        self.together = self.subject.pool.attach_host(settings, context)
        if self.together is None or self.together.memory.ranks != self.ranks:
            raise SystemExit("the ranks could not share an arena")
        self.places = [self.subject.place(self.tokens, seed) for seed in range(4)]
        self._plain: tuple[torch.Tensor, torch.Tensor] | None = None

    def gather(self, mine: Any) -> list[Any]:
        from sglang_dsv4.engine.ranks import gathered  # noqa: PLC0415

        return gathered(mine, self.ranks, torch.distributed.group.WORLD)

    def turn(self, host: Any, number: int) -> dict[str, float]:
        """Returns seconds of a save until it is enqueued and until its bytes are on the host, and of a load."""
        from sglang_dsv4.bench.subject import sync  # noqa: PLC0415

        swa_map = self.subject.pool.full_to_swa_index_mapping
        sync()
        self._line_up(host)
        started = time.perf_counter()
        copy = self._save(host, number % 4, wait=False)
        enqueued = time.perf_counter() - started
        host.check_search(copy)
        sync()
        save, nbytes = time.perf_counter() - started, copy.nbytes
        self._line_up(host)
        started = time.perf_counter()
        host.load(copy, self.places[(number + 1) % 4], swa_map, 1 + (number + 1) % 4)
        sync()
        return {"save": save, "enqueued": enqueued, "load": time.perf_counter() - started, "bytes": nbytes}

    def plain(self, nbytes: int) -> dict[str, float]:
        """Returns seconds of plain copies on all ranks at once: of this rank's part to the host, of all bytes back."""
        from sglang_dsv4.bench.subject import sync  # noqa: PLC0415

        if self._plain is None:
            device = self.subject.host.buffers.device
            there = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._plain = there, torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        there, here = self._plain
        seconds = {}
        for name, (target, source) in {
            "save": (here[: nbytes // self.ranks], there[: nbytes // self.ranks]), "load": (there, here),
        }.items():  # fmt: skip
            sync()
            self._line_up(self.together)
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            sync()
            seconds[name] = time.perf_counter() - started
        return seconds

    def _save(self, host: Any, place: int, wait: bool = True) -> Any:
        from sglang_dsv4.pools.copy_service import SaveRequest  # noqa: PLC0415

        swa_map = self.subject.pool.full_to_swa_index_mapping
        return host.save(SaveRequest(host.request(self.places[place], swa_map, 1 + place), wait=wait))

    def _line_up(self, host: Any) -> None:
        """Waits for every rank: ranks that move together begin together."""
        if host is self.together:
            host.true_on_every_rank(True)

    def check(self) -> int:
        """Returns pages that differ after a shared save and load into other pages."""
        source, target = self.places[0], self.places[1]
        swa_map = self.subject.pool.full_to_swa_index_mapping
        pages = [(slots[::256].long() // 256).cpu() for slots in (source, target)]
        buffers, wrong = self.together.buffers, 0
        wanted = {f.name: [b.view(-1) for b in buffers.buffers[f.name]] for f in buffers.families if f.whole_pages}
        size = {f.name: f.page_bytes for f in buffers.families}
        pick = lambda name, memory, at: torch.stack([memory[p * size[name] :][: size[name]] for p in at.tolist()])  # noqa: E731
        before = {name: [pick(name, memory, pages[0]).cpu() for memory in found] for name, found in wanted.items()}
        copy = self._save(self.together, 0)
        self.together.load(copy, target, swa_map, 2)
        for name, found in wanted.items():
            for memory, saved in zip(found, before[name], strict=True):
                wrong += int((pick(name, memory, pages[1]).cpu() != saved).any(dim=1).sum())
        return wrong


def run_rank(rank: int, arguments: argparse.Namespace, store: str, answers: Any) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=len(arguments.devices.split(","))
    )
    here = Rank(rank, arguments)
    wrong = here.check()
    alone, together, plain = [], [], []
    for number in range(arguments.times + WARM):
        if rank == 0:
            alone.append(here.turn(here.alone, number))
        torch.distributed.barrier()
        together.append(here.turn(here.together, number))
        torch.distributed.barrier()
        plain.append(here.plain(int(together[0]["bytes"])))
        torch.distributed.barrier()
    saved = here.together.counters.saved_bytes / here.together.counters.saves
    report = {"alone": alone[WARM:], "together": together[WARM:], "plain": plain[WARM:], "wrong": wrong, "saved": saved}
    report.update(held=here.together.memory.held_bytes, arena=here.together.memory.arena.nbytes)
    answers.put((rank, report))
    torch.distributed.barrier()


def median_ms(seconds: Iterable[float]) -> float:
    """Returns the median in milliseconds."""
    return statistics.median(seconds) * 1e3


def rows_of(reports: list[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns one row alone and one together: medians, of each turn the slowest rank's time."""
    alone = reports[0]["alone"]
    common = {"devices": arguments.devices, "tokens": arguments.tokens}

    def slowest(part: str, kind: str) -> float:
        return median_ms(map(max, zip(*([turn[kind] for turn in report[part]] for report in reports), strict=True)))

    def by_rank(kind: str) -> list[float]:
        return [median_ms(turn[kind] for turn in report["together"]) for report in reports]

    return [
        {"ranks": 1, **common, **{f"{kind}_ms": median_ms(t[kind] for t in alone) for kind in ("save", "load")},
         "enqueued_ms": [median_ms(t["enqueued"] for t in alone)], "host_bytes": alone[0]["bytes"]},
        {"ranks": len(reports), **common, **{f"{kind}_ms": slowest("together", kind) for kind in ("save", "load")},
         **{f"plain_{kind}_ms": slowest("plain", kind) for kind in ("save", "load")},
         "save_by_rank_ms": by_rank("save"), "load_by_rank_ms": by_rank("load"), "enqueued_ms": by_rank("enqueued"),
         "host_bytes": reports[0]["together"][0]["bytes"], "saved_bytes": [report["saved"] for report in reports],
         "wrong_pages": sum(r["wrong"] for r in reports), "held_at_end": sum(report["held"] for report in reports)},
    ]  # fmt: skip


def judge(rows: list[dict[str, Any]], own_links: bool) -> list[dict[str, Any]]:
    """Returns the bounds of ranks with a link each, or of two that share one."""
    alone, together = rows
    ranks = together["ranks"]
    save, load = together["save_ms"] / alone["save_ms"], alone["load_ms"] / together["load_ms"]
    where, at = "a link each" if own_links else "one link for all", f"TP {ranks}"
    most, least = (SAVE.get(ranks, 1.4 / ranks), LOAD.get(ranks, 1 / 1.05)) if own_links else (1.15, 0.9 / ranks)
    return [
        results.bound(f"save at {at} over TP 1, {where}", f"<= {most:.3g}", save),
        results.bound(f"load at TP 1 over {at}, {where}", f">= {least:.3g}", load),
        results.bound(
            f"host bytes of a copy at {at} over TP 1", "<= 1.0", together["host_bytes"] / alone["host_bytes"]
        ),
        results.bound(
            "bytes saved by all ranks over one copy", "<= 1.0", sum(together["saved_bytes"]) / alone["host_bytes"]
        ),
        results.bound("pages that differ after save and load", "<= 0", together["wrong_pages"]),
        results.bound("host bytes held at the end", "<= 0", together["held_at_end"]),
    ]


def wait_for(children: Sequence[Any], answers: Any) -> dict[int, Any]:
    """Returns each rank's report. Raises SystemExit when a rank ends without one."""
    found: dict[int, Any] = {}
    while len(found) < len(children):
        try:
            rank, found[rank] = answers.get(timeout=1)
        except queue.Empty:
            if any(child.exitcode for child in children):
                raise SystemExit("a rank ended; its error is above") from None
    return found


def main() -> int:
    parser = results.parser(__doc__, "node-transfer")
    cards = torch.cuda.device_count()
    default = ",".join(map(str, range(cards))) if cards > 1 else "0,0" if cards else "cpu,cpu"
    parser.add_argument("--devices", default=default, help="of each rank, two or more")
    parser.add_argument("--tokens", type=int, default=65_535)
    parser.add_argument("--layers", choices=("flash", "tiny"), default="flash")
    parser.add_argument("--times", type=int, default=25)
    results.add_out(parser)
    arguments = parser.parse_args()
    ranks = len(arguments.devices.split(","))
    if ranks < 2:
        parser.error(f"--devices {arguments.devices}: at least two ranks share an arena")
    answers = SPAWN.Queue()
    with tempfile.TemporaryDirectory() as folder:
        children = [
            SPAWN.Process(target=run_rank, args=(rank, arguments, f"file://{folder}/store", answers))
            for rank in range(ranks)
        ]
        for child in children:
            child.start()
        try:
            found = wait_for(children, answers)
        finally:
            for child in children:
                child.join(20)
                child.kill()
    rows = rows_of([found[rank] for rank in range(ranks)], arguments)
    results.show(rows)
    bounds = judge(rows, len(set(arguments.devices.split(","))) > 1)
    return results.finish(arguments, rows, bounds)


if __name__ == "__main__":
    raise SystemExit(main())

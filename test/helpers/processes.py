"""Runs several real processes at once: the ranks of a server, the servers of a machine."""

import multiprocessing
import queue
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

FORK = multiprocessing.get_context("fork")  # children inherit the imported engine


def _answer(answers: Any, number: int, work: Callable[..., Any], call: Sequence[Any]) -> None:
    try:
        answers.put((number, work(*call)))
    except BaseException:  # noqa: BLE001  # the parent shows it
        answers.put((number, traceback.format_exc()))


def together(work: Callable[..., Any], calls: Sequence[Sequence[Any]], apart: float = 0.0) -> list[Any]:
    """Returns ``work``'s answer to each of ``calls``, each in a process; a hang is an error after two minutes."""
    answers = FORK.Queue()
    children = [FORK.Process(target=_answer, args=(answers, number, work, call)) for number, call in enumerate(calls)]
    for child in children:
        child.start()
        time.sleep(apart)
    try:
        found = dict(answers.get(timeout=120) for _ in children)
    except queue.Empty:
        pytest.fail("the processes wait for one another")
    finally:
        for child in children:
            child.join(10)
            if child.is_alive():
                child.kill()
    for number, answer in found.items():
        assert "Traceback" not in str(answer), f"process {number}: {answer}"
    return [found[number] for number in range(len(calls))]


def on_ranks(folder: Path, work: Callable[[int], Any], ranks: int = 2) -> list[Any]:
    """Returns ``work(rank)`` in as many processes with a gloo group."""

    def as_rank(rank: int) -> Any:
        torch.set_num_threads(1)
        store = f"file://{folder}/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
        answer = work(rank)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        return answer

    return together(as_rank, [(rank,) for rank in range(ranks)])


def exchange(mine: Any) -> list[Any]:
    found = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    return found

#!/usr/bin/env python3
"""Plays scenes of real clients on a server that keeps sessions, beside stock: how much of a later prompt is cached.

    python3 -m benchmarks.scenes --model-path tools/tiny_checkpoint/v4 -- --mem-fraction-static 0.8

In each scene some conversations begin with a prompt of a few thousand tokens. Other requests evict them from the
device, and then later prompts come: a next turn, a fork, the same prompt again. Sessions keep the last page ends of the
first prompt and of its answer. A later prompt is a hit where the server has it cached up to the last of these before
the token at which it leaves what was computed. Both servers play a scene by turns, while the other one is suspended.

The tokens behind that page end are also scored, from the cache and on a flushed server: stock from its prefix cache
before anything is evicted, this package from its sessions. How far both scores of stock are apart is rounding.

Writes NAME.json, a table NAME.md and a picture NAME.png. --verify 0: loads are not compared with their copies, which
takes time. Arguments after -- go to both servers. Exit status 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.client import add_requests
from benchmarks.plain_pressure import PACKAGE, PAGE, STOCK, package_and_stock
from sglang_dsv4.bench import results
from sglang_dsv4.command_line import CONCURRENCY, COUNT, number
from sglang_dsv4.livetest import score, servers
from sglang_dsv4.livetest.load import FOLLOW_UP, Answer, Load, Run, check_lengths, warm_up
from sglang_dsv4.livetest.retract_stats import counted_at, read_log
from sglang_dsv4.livetest.runs import SETTLES

WINDOWS, PAGES = "windows", "everything"  # that other requests evict from the device
# The device has 384 pages and 65 windows. The first others take all windows and leave 304 pages, the second take all.
SERVER = ["--max-total-tokens", "98304", "--swa-full-tokens-ratio", "0.17",
          "--chunked-prefill-size", "4096", "--enable-metrics"]  # fmt: skip
OTHERS = {WINDOWS: (80, 300), PAGES: (160, 1000)}  # requests and their tokens, too few for a session of their own
BEHIND = 16  # tokens by which every second answer ends behind a page end: a trimmed one ends before it
LATER_TOKENS = 8  # of the answer to a later prompt
PAUSE = 0.05  # seconds of a tool call
STOPS = 128  # of so many tokens of the vocabulary one ends an answer
READ_OF = 2  # conversations whose later prompts are read
READ = 64  # most tokens scored
FURTHER = range(10, 34)  # tokens that are read behind a later prompt: one may end right behind a page end
FOUND = 0.3  # of stock's readings; its prefix cache has the window of only some page ends
EVICTED = 0.05  # most of the later prompts that stock has cached then
ALL = "all scenes"

Tokens = list[int]
More = Callable[..., Tokens]  # makes tokens: as many as it is told, or a follow-up's

# ---------------------------------------------------------------------- scenes


@dataclass(frozen=True)
class Scene:
    """Describes a client: ``later`` makes its later prompts from a prompt and the answer."""

    name: str
    later: Callable[[Tokens, Tokens, More], list[Tokens]]
    lost: str | None = PAGES  # before each of them; None: nothing, and it comes PAUSE after the answer
    sampling: Mapping[str, Any] = field(default_factory=dict)  # of the first request
    lengths: Sequence[int] = ()  # of the prompts; else --prompt says


def next_turn(prompt: Tokens, answer: Tokens, more: More) -> list[Tokens]:
    """Returns a follow-up behind the answer."""
    return [[*prompt, *answer, *more()]]


def again(prompt: Tokens, answer: Tokens, more: More) -> list[Tokens]:
    """Returns the same prompt."""
    return [prompt]


SCENES = (
    Scene("later turn", next_turn),
    Scene("later turn, windows lost", next_turn, WINDOWS),
    Scene("three forks of an answer", lambda *said: [*next_turn(*said), *next_turn(*said), *next_turn(*said)]),
    Scene("a turn behind each of best of 4", next_turn, sampling={"n": 4}),
    Scene("regenerate", again),
    Scene("thinking stripped", lambda prompt, answer, more: next_turn(prompt, answer[200:], more)),
    Scene("reply trimmed by 31 tokens", lambda prompt, answer, more: next_turn(prompt, answer[:-31], more)),
    Scene("another answer", lambda prompt, answer, more: next_turn(prompt, more(len(answer)), more)),
    Scene("tool call back in 50 ms", next_turn, lost=None),
    Scene("prompt of 4,096 k + 1 tokens", again, lengths=(4097, 8193)),
    Scene("ignore_eos off", next_turn, sampling={"ignore_eos": False}),
)


class Later(NamedTuple):
    """A later prompt, and how much of it may be cached."""

    prompt: Tokens
    reach: int  # the last kept page end before the token at which it leaves what was computed


def reach(prompt: Tokens, first: Tokens, answer: Tokens) -> int:
    """Returns the last kept page end from which ``prompt`` can go on behind ``first`` and its ``answer``."""
    said = [*first, *answer]
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, said, strict=False)))
    kept = [(length - 1) // PAGE * PAGE for length in (len(first), len(said))]  # the last token was not computed
    return max((end for end in kept if end < same), default=0)


# ---------------------------------------------------------------------- the run


class Play:
    """Plays a scene on one server. It makes the row of the result."""

    def __init__(self, scene: Scene, name: str, server: servers.Server, arguments: argparse.Namespace) -> None:
        self.scene, self.name, self.server, self.arguments = scene, name, server, arguments
        self._client = Run(Load([], []), arguments, server.url, None, None)
        self._first: list[tuple[int, Tokens]] = []  # tokens asked for, and the answer
        self._asked: list[tuple[Later, Answer]] = []
        self._losses = 0

    def run(self) -> dict[str, Any]:
        """Plays it from a flushed server to a flushed one; returns its row."""
        url = self.server.url
        servers.flush(url)
        before = loads_at(url)
        with ThreadPoolExecutor(self.arguments.concurrency if self.scene.lost else 1) as pool:
            talks = list(pool.map(self._talk, range(self.arguments.conversations)))
        to_read = [later for talk in talks[:READ_OF] for later in talk]
        warm = [self._read(later) for later in to_read] if self.name == STOCK else []
        for turn in itertools.zip_longest(*talks) if self.scene.lost else ():
            self._lose()  # before each: a fork would find what the one before it brought back
            self._ask(later for later in turn if later is not None)
        if self.name != STOCK:
            self._lose()
            warm = [self._read(later) for later in to_read]
        loads = {kind: count - before.get(kind, 0) for kind, count in loads_at(url).items()}
        cold = []
        for later in to_read:
            servers.flush(url)  # before each: they share their beginnings
            cold.append(self._read(later))
        servers.flush(url)
        return {**self._row(), "loads": loads, **compare(to_read, warm, cold)}

    def _talk(self, number: int) -> list[Later]:
        """Runs the first turn of a conversation, and returns its later prompts."""
        draw = random.Random(f"{self.arguments.seed}, {self.scene.name}, {number}")

        def more(count: int | None = None) -> Tokens:
            return self._tokens(draw, draw.randint(*FOLLOW_UP) if count is None else count)

        lengths, (least, most) = self.scene.lengths, self.arguments.new_tokens
        prompt = more(lengths[number % len(lengths)] if lengths else draw.randint(*self.arguments.prompt))
        wanted = least + (BEHIND - len(prompt) - least) % PAGE if number % 2 else draw.randint(least, most)
        told = []
        for answer in self._answers(prompt, wanted):
            told += [Later(new, reach(new, prompt, answer)) for new in self.scene.later(prompt, answer, more)]
        if self.scene.lost is None:
            time.sleep(PAUSE)
            self._ask(told)
        return told

    def _tokens(self, draw: random.Random, count: int) -> Tokens:
        return [draw.randrange(10, self.arguments.vocabulary) for _ in range(count)]

    def _answers(self, prompt: Tokens, wanted: int) -> list[Tokens]:
        """Returns the answers to a first prompt; none where the server does not answer, which is said."""
        sampling = {"max_new_tokens": wanted, "temperature": 1.0, "ignore_eos": True, **self.scene.sampling}
        if not sampling["ignore_eos"]:
            sampling["stop_token_ids"] = list(range(0, self.arguments.vocabulary, STOPS))
        body, found = {"input_ids": prompt, "sampling_params": sampling}, list[Tokens]()
        try:
            said = servers.post(self.server.url, "/generate", body, self.arguments.timeout)
            found = [one["output_ids"] for one in (said if isinstance(said, list) else [said])]
        except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
            print(f"  no answer: {type(error).__name__}: {error}", flush=True)
        missing: list[Tokens] = [[]] * (sampling.get("n", 1) - len(found))
        self._first += [(wanted, answer) for answer in [*found, *missing]]
        return found

    def _ask(self, later: Iterable[Later]) -> None:
        """Asks one by one: each has the server for itself."""
        self._asked += [(one, self._client.ask(one.prompt, LATER_TOKENS, 0)) for one in later]

    def _lose(self) -> None:
        """Lets other requests evict from the device what the scene loses."""
        if self.scene.lost is not None:
            self._losses += 1
            draw, (count, tokens) = random.Random(f"{self.scene.name}, {self._losses}"), OTHERS[self.scene.lost]
            load = Load([self._tokens(draw, tokens) for _ in range(count)], [1] * count)
            label = f"{self.scene.name}, {self.name}: others evict {self.scene.lost}"
            Run(load, self.arguments, self.server.url, None, None).execute(label)

    def _read(self, later: Later) -> tuple[list[float], int]:
        text, start = [*later.prompt, *FURTHER], later.reach + 1
        return score.read(self.server.url, text[:start], text[start : start + READ], self.arguments.timeout)

    def _row(self) -> dict[str, Any]:
        stops = not self.scene.sampling.get("ignore_eos", True)
        early = sum(0 < len(answer) < wanted for wanted, answer in self._first)
        whole = sum(len(answer) == wanted for wanted, answer in self._first) + early * stops
        each: dict[str, list[Any]] = {
            "tokens": [len(later.prompt) for later, _ in self._asked],
            "could_be": [later.reach for later, _ in self._asked],
            "cached": [answer.cached for _, answer in self._asked],
            "on_host": [answer.on_host for _, answer in self._asked],
            "first_token_ms": [(one.arrived[0][0] - one.sent) * 1e3 for _, one in self._asked if one.arrived],
        }
        return {
            "run": self.name, "scene": self.scene.name, "asked": len(self._first) + len(self._asked),
            "whole": whole + sum(answer.outcome == "whole" for _, answer in self._asked), "ended_early": early * stops,
            "hits": mean([answer.cached >= later.reach for later, answer in self._asked]),
            "cached_share": sum(each["cached"]) / max(1, sum(each["could_be"])),
            **{f"{name}_p50": statistics.median(values or [0.0]) for name, values in each.items()}, **each,
        }  # fmt: skip


Scores = Sequence[tuple[list[float], int]]


def compare(read: Sequence[Later], warm: Scores, cold: Scores) -> dict[str, Any]:
    """Returns how far scores from the cache are from those of a flushed server, of prompts that the cache had."""
    had = [cached >= later.reach for later, (_, cached) in zip(read, warm, strict=True)]
    distances = [
        statistics.mean(abs(a - b) for a, b in zip(one, other, strict=True))
        for found, (one, _), (other, _) in zip(had, warm, cold, strict=True)
        if found
    ]
    return {"read": len(read), "read_found": mean(had), "found_after_flush": sum(cached for _, cached in cold),
            "distance": mean(distances), "distances": distances}  # fmt: skip


def mean(values: Sequence[float]) -> float:
    """Returns the mean; 0 of no values."""
    return statistics.mean(values) if values else 0.0


def loads_at(url: str) -> dict[str, int]:
    """Returns how many requests went on from a session so far, by kind of the load."""
    return dict(counted_at(url).get("sessions", {}).get("hits", {}))


def measure(both: dict[str, servers.Server], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each scene and server, and a last one of this package's counts."""
    rows = []
    for name, server in both.items():  # not looked at: some shapes of later prompts compile here
        with server.awake():
            warm_up([server.url], arguments.vocabulary, arguments.timeout)
            Play(SCENES[0], name, server, arguments).run()
    for place, scene in enumerate(SCENES):
        for name in sorted(both, reverse=bool(place % 2)):
            with both[name].awake():
                rows.append(Play(scene, name, both[name], arguments).run())
            results.show([{key: value for key, value in rows[-1].items() if not isinstance(value, list)}])
    ours = both[PACKAGE]
    with ours.awake():  # it was flushed behind the last scene
        time.sleep(SETTLES)
        counted, log = counted_at(ours.url).get("sessions", {}), read_log(ours.log)
    return [*rows, {"run": PACKAGE, "scene": ALL, "sessions": counted, "trouble": log["trouble"]}]


# ---------------------------------------------------------------------- the bounds


def by_scene(rows: Sequence[dict[str, Any]]) -> list[tuple[Scene, dict[str, Any], dict[str, Any]]]:
    """Returns each scene with its rows: this package's and stock's."""
    of = {(row["scene"], row["run"]): row for row in rows}
    return [(scene, of[scene.name, PACKAGE], of[scene.name, STOCK]) for scene in SCENES]


def judge(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the bounds: each later prompt a hit, its first token not later than stock's, scores as when flushed."""
    scenes, counted, played = by_scene(rows), rows[-1]["sessions"], rows[:-1]
    loads = sum(counted.get("hits", {}).values())
    read = [row["read_found"] for _, _, row in scenes]
    kept = [row["cached_share"] for scene, _, row in scenes if scene.lost == PAGES]
    windows = sum(ours["loads"].get("window", 0) for scene, ours, _ in scenes if scene.lost == WINDOWS)
    bounds = [
        results.bound("requests without a whole answer", "<= 0", sum(row["asked"] - row["whole"] for row in played)),
        results.bound("answers that ended early where they may", ">= 1", sum(row["ended_early"] for row in played)),
        results.bound("share that stock has cached where everything was evicted", f"<= {EVICTED}", max(kept)),
        results.bound("loads of windows alone where they were evicted", ">= 1", windows),
        results.bound("later prompts read that stock has cached, share", f">= {FOUND}", mean(read)),
        results.bound("trouble in the log", "<= 0", len(rows[-1]["trouble"])),
        results.bound("points left after a flush", "<= 0", counted.get("points", 0)),
        results.bound("tokens found after a flush", "<= 0", sum(row["found_after_flush"] for row in played)),
    ]
    if arguments.verify:
        not_compared = loads - counted.get("verified", 0)
        bounds.append(results.bound("loads of sessions not compared with their copy", "<= 0", not_compared))
    stocks = [distance for _, _, row in scenes for distance in row["distances"]]
    far = f"scores from those on a flushed server, beyond stock's and {score.ERRORS} standard errors"
    for scene, ours, stock in scenes:
        bounds.append(results.bound(f"later prompts that hit, share, {scene.name}", ">= 1.0", ours["hits"]))
        if scene.lost:
            ratio = ours["first_token_ms_p50"] / max(stock["first_token_ms_p50"], 1e-6)
            bounds.append(results.bound(f"first token, median, by stock's, {scene.name}", "<= 1.0", ratio))
        bounds += [
            results.bound(f"later prompts read that it has cached, share, {scene.name}", ">= 1.0", ours["read_found"]),
            results.bound(f"{far}, {scene.name}", "<= 0", farther(ours["distances"], stocks)),
        ]
    every = [distance for _, ours, _ in scenes for distance in ours["distances"]]
    return [*bounds, results.bound(f"{far}, {ALL}", "<= 0", farther(every, stocks))]


def farther(distances: Sequence[float], stocks: Sequence[float]) -> float:
    """Returns by how much ``distances`` are greater than ``stocks``, beyond chance.

    A scene has few of them: how far they scatter is told by stock's of all scenes.
    """
    if not distances or len(stocks) < 2:
        return 0.0  # another bound says that nothing was found
    chance = score.ERRORS * statistics.stdev(stocks) * (1 / len(distances) + 1 / len(stocks)) ** 0.5
    return mean(distances) - mean(stocks) - chance


# ---------------------------------------------------------------------- table and picture


def table(result: dict[str, Any]) -> str:
    """Returns the result as Markdown: machine, command, one line a scene, the bounds that are missed."""
    lines = [
        f"# {result['bench']}: later prompts of real clients", "", results.headline(result), "",
        "Medians. Cached tokens could be: up to the last kept page end before the prompt leaves what was computed.", "",
        "| scene | lost meanwhile | later prompts | tokens | cached, could be | with sessions | stock "
        "| hits, with sessions | stock | first token ms, with sessions | stock |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for scene, *rows in by_scene(result["rows"]):
        ours = rows[0]
        cells = [scene.name, scene.lost or "nothing", str(len(ours["tokens"]))]
        cells += [f"{ours[key]:,.0f}" for key in ("tokens_p50", "could_be_p50")]
        cells += [f"{row['cached_p50']:,.0f}" for row in rows] + [f"{row['hits']:.0%}" for row in rows]
        cells += [f"{row['first_token_ms_p50']:.0f}" for row in rows]
        lines.append(f"| {' | '.join(cells)} |")
    missed = [bound for bound in result["bounds"] if not bound["ok"]]
    lines += ["", "Bounds missed:", ""] if missed else ["", "All bounds are met."]
    return "\n".join([*lines, *(f"- {bound['name']}: {bound['value']} ({bound['bound']})" for bound in missed)]) + "\n"


def draw_bars(result: dict[str, Any], path: Path) -> None:
    """Draws the median first token of each scene, this package's above stock's."""
    from PIL import Image, ImageDraw, ImageFont  # noqa: PLC0415 - the engine has it, a machine without one may not

    left, width, thick, step, colours = 320, 560, 16, 52, {PACKAGE: "#1f77b4", STOCK: "#9a9a9a"}
    scenes, font = by_scene(result["rows"]), ImageFont.load_default(16)
    longest = max(row["first_token_ms_p50"] for _, *rows in scenes for row in rows)
    image = Image.new("RGB", (left + width + 130, step * len(scenes) + 60), "white")
    draw = ImageDraw.Draw(image)
    draw.text((12, 14), "first token of a later prompt, median ms", "black", font)
    for place, (name, colour) in enumerate(colours.items()):
        at = left + 190 * place + 40
        draw.rectangle((at, 16, at + thick, 16 + thick), colour)
        draw.text((at + thick + 8, 14), name, "black", font)
    for place, (scene, *rows) in enumerate(scenes):
        top = 50 + step * place
        draw.text((12, top + thick - 10), scene.name, "black", font)
        for row, y in zip(rows, (top, top + thick + 2), strict=True):
            end = left + width * row["first_token_ms_p50"] / max(longest, 1e-6)
            draw.rectangle((left, y, end, y + thick), colours[row["run"]])
            draw.text((end + 8, y - 2), f"{row['first_token_ms_p50']:.0f}", "black", font)
    image.save(path)


# ---------------------------------------------------------------------- the command


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line; the arguments behind ``--`` are for both servers."""
    parser = results.parser(__doc__, "sessions-scenes")
    parser.add_argument("--model-path", type=servers.model_path, required=True)
    parser.add_argument("--conversations", type=COUNT, default=4, help="of each scene")
    parser.add_argument("--prompt", type=COUNT, nargs=2, default=(4000, 8000), help="fewest and most tokens")
    parser.add_argument("--new-tokens", type=COUNT, nargs=2, default=(300, 600), help="of each first answer")
    parser.add_argument("--concurrency", type=CONCURRENCY, default=4, help="first prompts at a time")
    parser.add_argument("--host-gb", type=number(float, 0.1), default=4, help="DSV4_HOST_GB")
    parser.add_argument("--verify", type=int, choices=(0, 1), default=1, help="DSV4_VERIFY: compare each load")
    add_requests(parser)
    arguments = servers.parse(parser, argv)
    check_lengths(parser, arguments)
    arguments.server = [*SERVER, *arguments.server]
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Returns exit status 1 when a bound is missed."""
    arguments = parse(argv)
    servers.end_when_told()
    keeps = {"DSV4_SESSIONS": "auto", "DSV4_HOST_GB": str(arguments.host_gb), "DSV4_VERIFY": str(arguments.verify)}
    with package_and_stock(arguments, keeps) as both:  # they take half a minute to end: the result is written before
        rows = measure(both, arguments)
        bounds = judge(rows, arguments)
        path = results.write(arguments.name, rows, bounds, arguments.out)
        result = json.loads(path.read_text())
        path.with_suffix(".md").write_text(table(result))
        draw_bars(result, path.with_suffix(".png"))
        return results.status(bounds)


if __name__ == "__main__":
    sys.exit(main())

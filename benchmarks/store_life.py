"""Shows what the store keeps for a later life of a server: after a kill, for a second server, tier by tier, damaged.

    python3 -m benchmarks.store_life --scene restart --config benchmarks/flash_config.json --experts 8 \\
        -- --mem-fraction-static 0.9

Agents begin with a context of --tokens and have two turns, whose cache is stored. Then, by scene:
restart: in the third turn the server and its store process get SIGKILL. It starts again with the same folder, whose
files are dropped from the page cache, and the agents have that turn. Stock with HiCache and its file backend goes
through the same beside it. Told beside both is the rate of plain reads of the same files, eight at a time.
takeover: a second server has the third turn. --backend mooncake: over TCP, with master and memory started here.
tiers: the first token of a context that is recomputed, on the device, on the host and in the store, and a picture.
damage: a third of the files is flipped, cut or swapped between two lives, and DSV4_VERIFY compares each load.

First tokens are judged by those of new prompts as long, on the same server. Tokens behind the stored part of some
prompts are scored with the cache, and computed: under another extra_key, for a flush does not empty the store. How far
scores from the device's own cache are from computed ones is rounding. Arguments after -- go to all servers. Exit status
1 when a bound is missed.
"""

import argparse
import contextlib
import http.client
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import store_servers as stores
from benchmarks.client import model_of
from benchmarks.scenes import FURTHER, PAGE, READ, Later, compare, farther
from benchmarks.session_agents import LONG, Agents, Turn, is_whole, median_wait, waits
from benchmarks.store_servers import OURS, PEER, Way, in_files, ours, settle, start
from sglang_dsv4.bench import results
from sglang_dsv4.livetest import score, servers
from sglang_dsv4.livetest.load import Load, count_outcomes
from sglang_dsv4.livetest.retract_stats import read_log

DAMAGED, MENDED = "damaged", "damaged, a turn later"
RECOMPUTED, DEVICE, HOST, STORE = TIERS = ("recomputed", "on the device", "on the host", "in the store")
FIRST_TOKEN = {"restart": 0.15, "takeover": 0.2, "tiers": 0.2}  # of a new prompt's, of a whole model at long contexts
CACHED, MISSED, FOUND = 0.95, 0.9, 0.9  # of what was written, and most of it if it is damaged; of a tier's turns
COLD, READ_OF = 4, 4  # new prompts to compare with; prompts whose tokens are scored

Row = dict[str, Any]
Read = tuple[list[float], int]

# ---------------------------------------------------------------------- conversations


class Talk:
    """Holds the conversations of all agents through the lives of their server."""

    def __init__(self, way: Way, arguments: argparse.Namespace) -> None:
        self.way, self.arguments = way, arguments
        self.agents = Agents(arguments.agents, arguments.tokens, 0, arguments)
        self.facts: Row = {}
        self._turns: list[Turn] = []  # whose answers must be whole
        self._logs: list[Path] = []

    def begin(self, server: servers.Server) -> None:
        """Runs two turns, and waits until the store has them."""
        before = stores.bytes_of(self.way.objects)
        self._logs.append(server.log)
        for name in ("first", "second"):
            self._turns.append(self.agents.turn(server.url, self.agents.order(), f"{self.way.name}, {name} turns"))
        settle(server, self.way.objects)
        self.facts["bytes_a_session"] = (stores.bytes_of(self.way.objects) - before) / self.arguments.agents

    def cut_off(self, server: servers.Server) -> None:
        """Kills the server amid the third turn."""
        wanted = [self.arguments.answer] * len(self.agents.said)
        turn = Turn(Load(self.agents.said, wanted), self.arguments, server.url, None, None)
        thread = threading.Thread(target=turn.execute, args=(f"{self.way.name}, killed amid third turns",))
        thread.start()
        while thread.is_alive() and not turn.done:
            time.sleep(0.001)
        server.kill()
        thread.join()
        self.facts["cut_off"] = sum(answer.outcome != "whole" for answer in turn.answers)

    def go_on(self, server: servers.Server, name: str | None = None) -> Row:
        """Runs the next turn, then new prompts as long, and scores tokens; returns the row."""
        self._logs.append(server.log)
        order, added = self.agents.order(), self.arguments.turn - self.arguments.answer
        prompts = [self.agents.said[agent] for agent in order]
        laters = [Later(prompt, (len(prompt) - added - 1) // PAGE * PAGE) for prompt in prompts]
        later = self.agents.turn(server.url, order, f"{self.way.name}, later turns")
        new = Agents(COLD, len(prompts[0]), len(self._logs), self.arguments)
        cold = new.turn(server.url, new.order(), f"{self.way.name}, new prompts")
        self._turns += [later, cold]
        cached = sum(min(answer.cached, one.reach) for answer, one in zip(later.answers, laters, strict=True))
        return {
            "run": name or self.way.name, "agents": self.arguments.agents, "context": self.arguments.tokens,
            **count_outcomes([answer for turn in self._turns for answer in turn.answers]),
            "cached": cached / sum(one.reach for one in laters), "first_token_p50_ms": median_wait([later]),
            "first_token_max_ms": max(waits([later]), default=0.0), "cold_first_token_p50_ms": median_wait([cold]),
            "by_cold": median_wait([later]) / max(median_wait([cold]), 1e-6), **self.facts,
            **self._scores(server.url, laters[:READ_OF]),
            "trouble": [word for log in self._logs for word in read_log(log)["trouble"]],
        }  # fmt: skip

    def _scores(self, url: str, laters: Sequence[Later]) -> Row:
        """Returns how far scores from the store, and from the device alone, are from those that are computed."""
        salt, read, scores = {"extra_key": f"computed {len(self._logs)}"}, list[Later](), list[list[Read]]()
        for later in laters:
            text, first = [*later.prompt, *FURTHER], later.reach + 1
            asked = url, text[:first], text[first : first + READ], self.arguments.timeout
            try:
                scores.append([score.read(*asked, more) for more in ({}, salt, salt)])
                read.append(later)
            except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
                print(f"  not scored: {type(error).__name__}: {error}", flush=True)
        stored, cold, again = ([each[place] for each in scores] for place in range(3))
        device = compare(read, again, cold)
        return {**compare(read, stored, cold), "rounding": device["distance"], "roundings": device["distances"]}


# ---------------------------------------------------------------------- scenes


def restart(stack: contextlib.ExitStack, arguments: argparse.Namespace) -> list[Row]:
    """Kills both servers and starts them again; returns a row for each."""
    ways = [ours(arguments, in_files(stack, arguments, "ours"))]
    ways += [] if arguments.without_peer else [stores.hicache(arguments, in_files(stack, arguments, "hicache"))]
    talks, rows = [Talk(way, arguments) for way in ways], []
    for talk, server in zip(talks, start(stack, ways, arguments), strict=True):
        server.wake()
        talk.begin(server)
        talk.cut_off(server)
    for talk, server in zip(talks, start(stack, ways, arguments, life=1), strict=True):
        with server.awake():
            talk.facts["disk_gb_a_second"] = stores.disk_rate(talk.way.objects)
            rows.append(talk.go_on(server))
    return rows


def takeover(stack: contextlib.ExitStack, arguments: argparse.Namespace) -> list[Row]:
    """Lets a second server go on; returns its row."""
    mooncake = arguments.backend == "mooncake"
    store = stores.in_mooncake(stack, arguments) if mooncake else in_files(stack, arguments, "ours")
    cards = [{"CUDA_VISIBLE_DEVICES": device} for device in arguments.devices] or [{}, {}]
    ways = [ours(arguments, store, apart=apart, **card) for apart, card in zip((0, score.APART), cards, strict=True)]
    talk = Talk(ways[1], arguments)
    first, second = start(stack, ways, arguments)
    with first.awake():
        talk.begin(first)
    with second.awake():
        return [talk.go_on(second)]


def tiers(stack: contextlib.ExitStack, arguments: argparse.Namespace) -> list[Row]:
    """Has the same conversations from each tier, one at a time; returns a row for each tier."""
    way = ours(arguments, in_files(stack, arguments, "ours"))
    (server,) = start(stack, [way], arguments)
    agents = Agents(arguments.agents, arguments.tokens, 0, arguments)
    told: dict[str, list[Turn]] = {tier: [] for tier in TIERS}

    def run(*names: str) -> None:
        for agent in range(arguments.agents):
            for name in names:
                told[name].append(agents.turn(server.url, [agent], f"agent {agent}, {name}"))

    with server.awake():
        run(RECOMPUTED)
        run(HOST, DEVICE)  # the other agents have evicted it, and then its own turn has brought it back
        settle(server, way.objects)
        servers.flush(server.url)
        disk = stores.disk_rate(way.objects)
        run(STORE)
    trouble, rows = read_log(server.log)["trouble"], []
    for name, turns in told.items():
        answers = [answer for turn in turns for answer in turn.answers]
        rows.append({
            "run": name, **count_outcomes(answers), "first_token_p50_ms": median_wait(turns), "trouble": trouble,
            "found": sum(turn.found() for turn in turns) / len(answers),
            "on_host": sum(answer.on_host > 0 for answer in answers) / len(answers), "disk_gb_a_second": disk,
        })  # fmt: skip
    return rows


def damage(stack: contextlib.ExitStack, arguments: argparse.Namespace) -> list[Row]:
    """Damages the store between two lives; returns a row for the turn that finds it, and one for the next turn."""
    objects = in_files(stack, arguments, "ours")
    way = ours(arguments, objects, DSV4_VERIFY="1")
    talk = Talk(way, arguments)
    (server,) = start(stack, [way], arguments)
    server.wake()
    talk.begin(server)
    server.stop()
    talk.facts["spoiled"] = stores.spoil(objects, arguments.seed)
    (server,) = start(stack, [way], arguments, life=1)
    with server.awake():
        found = talk.go_on(server, DAMAGED)
        settle(server, objects)
        servers.flush(server.url)
        return [found, talk.go_on(server, MENDED)]


SCENES = {"restart": restart, "takeover": takeover, "tiers": tiers, "damage": damage}

# ---------------------------------------------------------------------- the bounds


def judge(rows: Sequence[Row], arguments: argparse.Namespace) -> list[Row]:
    """Returns the bounds. What stock does is told, and not judged."""
    mine = [row for row in rows if row["run"] != PEER]
    by_name = {row["run"]: row for row in mine}
    bounds = [
        results.bound("requests without a whole answer", "<= 0", sum(row["asked"] - row["whole"] for row in mine)),
        results.bound("trouble in a log", "<= 0", sum(len(row["trouble"]) for row in mine)),
    ]
    strict = arguments.scene in FIRST_TOKEN and arguments.tokens >= LONG and is_whole(arguments.config)
    most = f"<= {FIRST_TOKEN[arguments.scene] if strict else 1.0}"
    if arguments.scene == "tiers":
        return bounds + judge_tiers(by_name, most)
    bounds += judge_damage(by_name) if arguments.scene == "damage" else judge_life(by_name[OURS], most)
    roundings = [rounding for row in mine for rounding in row["roundings"]]
    far = farther([distance for row in mine for distance in row["distances"]], roundings)
    name = f"scores from computed ones, beyond the device's and {score.ERRORS} standard errors"
    return [
        *bounds,
        results.bound("prompts scored on the device", ">= 2", len(roundings)),
        results.bound(name, "<= 0", far),
    ]


def judge_life(row: Row, most: str) -> list[Row]:
    """Returns the bounds of a later life, or of a second server."""
    cut_off = [results.bound("requests cut off by the kill", ">= 1", row["cut_off"])] if "cut_off" in row else []
    return [
        *cut_off,
        results.bound("tokens cached, by those written", f">= {CACHED}", row["cached"]),
        results.bound("first token of a later turn, median, by a new prompt's", most, row["by_cold"]),
        results.bound("prompts scored that it has cached, share", ">= 1.0", row["read_found"]),
    ]


def judge_damage(by_name: Mapping[str, Row]) -> list[Row]:
    """Returns the bounds of a damaged store: it is seen, and the next turn has all again."""
    bad, mended = by_name[DAMAGED], by_name[MENDED]
    return [
        results.bound("files that were damaged", ">= 1", bad["spoiled"]),
        results.bound("tokens cached, by those written", f"<= {MISSED}", bad["cached"]),
        results.bound("the same a turn later", f">= {CACHED}", mended["cached"]),
    ]


def judge_tiers(by_name: Mapping[str, Row], most: str) -> list[Row]:
    """Returns the bounds of the tiers: each turn was there, and a later tier takes longer."""
    wait = {name: max(row["first_token_p50_ms"], 1e-6) for name, row in by_name.items()}
    return [
        results.bound(f"turns found, share, {RECOMPUTED}", "<= 0", by_name[RECOMPUTED]["found"]),
        *(results.bound(f"turns found, share, {name}", f">= {FOUND}", by_name[name]["found"]) for name in TIERS[1:]),
        results.bound(f"turns from the host, share, {DEVICE}", f"<= {1 - FOUND:.1f}", by_name[DEVICE]["on_host"]),
        results.bound(f"turns from the host, share, {HOST}", f">= {FOUND}", by_name[HOST]["on_host"]),
        results.bound(f"first token, median, {STORE}, by that {RECOMPUTED}", most, wait[STORE] / wait[RECOMPUTED]),
        results.bound(f"first token, median, {HOST}, by that {STORE}", "<= 1.0", wait[HOST] / wait[STORE]),
    ]


def draw_tiers(rows: Sequence[Row], path: Path) -> None:
    """Draws the median first token of each tier."""
    from PIL import Image, ImageDraw, ImageFont  # noqa: PLC0415 - the engine has it, a machine without one may not

    left, width, step, font = 160, 560, 40, ImageFont.load_default(16)
    longest = max(row["first_token_p50_ms"] for row in rows)
    image = Image.new("RGB", (left + width + 110, step * len(rows) + 60), "white")
    draw = ImageDraw.Draw(image)
    draw.text((12, 14), "first token of a turn by where its context is, median ms", "black", font)
    for place, row in enumerate(rows):
        top, end = 50 + step * place, left + width * row["first_token_p50_ms"] / max(longest, 1e-6)
        draw.text((12, top + 2), row["run"], "black", font)
        draw.rectangle((left, top, end, top + 24), "#9a9a9a" if row["run"] == RECOMPUTED else "#1f77b4")
        draw.text((end + 8, top + 2), f"{row['first_token_p50_ms']:.0f}", "black", font)
    image.save(path)


# ---------------------------------------------------------------------- the command


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line; tiers run one conversation at a time."""
    parser = stores.options(__doc__, list(SCENES))
    parser.add_argument("--without-peer", action="store_true", help="restart: without HiCache")
    parser.add_argument("--backend", choices=("file", "mooncake"), default="file", help="of a takeover")
    parser.add_argument("--devices", nargs=2, default=(), help="GPUs of both servers of a takeover (the same one)")
    arguments = stores.read_options(parser, argv)
    arguments.concurrency = 1 if arguments.scene == "tiers" else arguments.concurrency
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Returns exit status 1 when a bound is missed."""
    arguments = parse(argv)
    servers.end_when_told()
    arguments.model_path = str(model_of(arguments)[0])
    with contextlib.ExitStack() as stack:  # servers take half a minute to end: the result is written before
        rows = SCENES[arguments.scene](stack, arguments)
        results.show([{key: value for key, value in row.items() if not isinstance(value, list)} for row in rows])
        bounds = judge(rows, arguments)
        path = results.write(arguments.name, rows, bounds, arguments.out)
        if arguments.scene == "tiers":
            draw_tiers(rows, path.with_suffix(".png"))
        return results.status(bounds)


if __name__ == "__main__":
    sys.exit(main())

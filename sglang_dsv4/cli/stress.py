"""Forces retracts on a live server: nothing lost, every load exact, tokens as likely as without retracts.

    sglang-dsv4 stress --model-path MODEL --requests 500 --interval 6             # one decode server, fake transfer
    sglang-dsv4 stress --model-path MODEL --transfer nixl                         # a pair, real cache, tokens scored
    sglang-dsv4 stress --model-path MODEL --plain --interval 5 --prompt 300 2500  # a plain server, tokens scored
    sglang-dsv4 stress --attach URL [--prefill-url URL [--plain-url URL]] [--log FILE]     # servers that run already

The servers are started and stopped here, with the package, DSV4_VERIFY=1 and metrics; arguments after -- go to them.
fake: the transfer brings no cache, so tokens mean nothing. nixl: a prefill and a decode server on one GPU; the first
--score requests are then sent again, and again with a cache family zeroed in each loaded copy. When both servers are
gone a plain one answers them too (the control) and scores all: how likely is each token of an answer behind its prompt?
Answers after retracts must be as likely as the control's, the damaged ones must not. --recompute: a plain stock server
with as many forced retracts answers them, too, and the tokens that its recompute changes are counted.
--plain: one server that does both; the engine checks its memory at every step. What the prefix tree still has is not
loaded, so the tree is made to miss (SGLANG_RADIX_FORCE_MISS) unless --keep-tree. The control stands beside it.
--choices: answers return which experts each token chose. The control says what it chooses for the same tokens: after
retracts there may be no other difference than without, and one must be seen where copies lose their rows of choices.
--turns: all prompts are answered, then all go on behind their answers, and so on, on a plain server or a pair. A plain
server keeps sessions, the prefill server of a pair where DSV4_SESSIONS asks it to: these turns must go on from the
host, each load compared, and after a flush nothing may be held. --turns and --keep-tree keep the tree. Scored are the
answers of last turns, which read pages that restored requests published, or HiCache or sessions brought back; each
zeroed run holds its conversations from the first turn.
--kill-store: a plain server with DSV4_STORE loses its store process every so many seconds, and nothing else.
--stock runs the engine as it is. --attach: a decode server that runs already is neither started nor stopped and keeps
its settings (DSV4_VERIFY; SGLANG_TEST_RETRACT, without which it retracts only under real pressure). Its counts are read
from its metrics (--enable-metrics), its log, or both, so no other requests should be there; that loads are compared
(--verify 1) only the metrics tell. Tokens are scored where a plain server of the same model is named too (--plain-url).
Exit status 1 on any loss, mismatch or leak, 2 when a server to attach to says nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_dsv4.bench import results
from sglang_dsv4.command_line import CONCURRENCY, COUNT, COUNT_OR_ZERO, PORT, SECONDS, number, readable_file
from sglang_dsv4.livetest import choices, score, servers
from sglang_dsv4.livetest.load import VOCABULARY, Answer, Load, Run, check_lengths
from sglang_dsv4.livetest.runs import Found, attach_and_run, serve_and_run
from sglang_dsv4.livetest.zeroing import CHOICES
from sglang_dsv4.settings import read_settings

LOADED_SHARE = 0.5  # of a plain server's retracts; the rest are young requests, which the engine computes as fast
WENT_ON = 0.5  # of later turns, from a session; the rest found the prefix cache, or have too few tokens to be kept
CACHED = 0.3  # of the scored prompts' tokens, where they go on from earlier turns
NOT_MATCHED = "PointNotMatched"
SCORED = 100  # requests whose tokens are scored where that means something


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options; the arguments behind ``--`` are for the servers."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--model-path", type=servers.model_path, help="start servers of this model")
    where.add_argument("--attach", type=servers.checked_url, metavar="URL", help="a decode server that runs")
    beside = parser.add_argument_group("with --attach")
    beside.add_argument("--prefill-url", type=servers.checked_url, metavar="URL", help="the prefill server beside it")
    beside.add_argument("--bootstrap-port", type=PORT, help=f"that server's (default: {servers.BOOTSTRAP_PORT})")
    beside.add_argument("--plain-url", type=servers.checked_url, metavar="URL", help="a plain server, to score tokens")
    beside.add_argument("--log", type=readable_file, metavar="FILE", help="the log that the decode server writes")
    parser.add_argument("--plain", action="store_true", help="a plain server, which prefills and decodes")
    parser.add_argument("--keep-tree", action="store_true", help="with --plain: prompts are found in the prefix tree")
    parser.add_argument("--transfer", choices=("fake", "nixl"), default="fake")
    parser.add_argument("--requests", type=COUNT, default=500)
    parser.add_argument("--turns", type=COUNT, default=1, help="of the conversation of each request (--plain, nixl)")
    parser.add_argument("--concurrency", type=CONCURRENCY, default=16)
    help_ = "forward steps between forced retracts; 0: none forced"
    parser.add_argument("--interval", type=COUNT_OR_ZERO, default=20, help=help_)
    parser.add_argument("--prompt", type=COUNT, nargs=2, default=(30, 2500), help="shortest and longest prompt")
    parser.add_argument("--new-tokens", type=COUNT, nargs=2, default=(40, 200))
    parser.add_argument("--vocabulary", type=VOCABULARY, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verify", type=int, choices=(0, 1), default=1)
    parser.add_argument("--score", type=COUNT_OR_ZERO, metavar="N", help=f"answers to score; 0: none (nixl: {SCORED})")
    help_ = f"how far answers' mean log probability may lie below the control's ({score.MEAN_SLACK})"
    parser.add_argument("--within", type=number(float, 0), default=score.MEAN_SLACK, help=help_)
    parser.add_argument(
        "--zero", metavar="FAMILY", nargs="+", default=["swa_kv"], help="damage the scored answers by each of these"
    )
    parser.add_argument("--choices", action="store_true", help="compare the experts of each token of scored answers")
    parser.add_argument("--recompute", action="store_true", help="score a plain stock server under retracts, too")
    parser.add_argument("--beside", action="store_true", help="start plain servers at once, where the GPU has room")
    parser.add_argument("--stock", action="store_true", help="the engine without this package")
    parser.add_argument("--may-refuse", type=COUNT_OR_ZERO, default=0, help="requests that may get 503")
    parser.add_argument("--falls-back", metavar="REASON", help="some retract must find no host copy for this reason")
    help_ = "between kills of the store process of a plain server with DSV4_STORE"
    parser.add_argument("--kill-store", type=SECONDS, metavar="SECONDS", help=help_)
    parser.add_argument("--at-least", type=COUNT_OR_ZERO, default=1, help="retracts that there must be")
    parser.add_argument("--patience", type=SECONDS, default=servers.PATIENCE, help="seconds for the servers to come up")
    parser.add_argument("--timeout", type=SECONDS, default=300, help="seconds for one request")
    help_ = "of a run; what was not sent until then is not sent"
    parser.add_argument("--most-seconds", type=number(float, 0), help=help_)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses and checks the command line; ``server``: the arguments for the servers."""
    parser = results.parser(__doc__, "stress", prog="sglang-dsv4 stress")
    add_arguments(parser)
    arguments = servers.parse(parser, argv)
    check_lengths(parser, arguments)
    if arguments.attach and (arguments.stock or arguments.server):
        parser.error("--stock and arguments after -- are for servers started here, not for --attach")
    beside = (arguments.prefill_url, arguments.plain_url, arguments.log, arguments.bootstrap_port)
    if not arguments.attach and any(beside):
        parser.error("--prefill-url, --plain-url, --bootstrap-port and --log belong to --attach")
    if arguments.plain and (arguments.transfer == "nixl" or arguments.prefill_url or arguments.bootstrap_port):
        parser.error("--plain is one server: no --transfer nixl, no --prefill-url")
    if arguments.plain_url and not (arguments.prefill_url or arguments.plain):
        parser.error("--plain-url scores answers to prompts that were computed: name the --prefill-url too")
    computed = arguments.plain or arguments.transfer == "nixl"
    if arguments.turns > 1 and (not computed or arguments.attach):
        parser.error("--turns: of servers started here that prefill (--plain or --transfer nixl, --model-path)")
    stored = arguments.plain and not arguments.attach and os.environ.get("DSV4_STORE", "off") != "off"
    if arguments.kill_store and not stored:
        parser.error("--kill-store: of a plain server started here with DSV4_STORE")
    folder = "" if arguments.attach or arguments.stock else read_settings().store.folder
    if folder and Path(folder).is_dir() and any(Path(folder).iterdir()):
        parser.error(f"DSV4_STORE={folder} has objects of an earlier run, whose prompts are the same: remove it")
    arguments.keep_tree |= arguments.turns > 1
    arguments.sessions = computed and not (arguments.stock or arguments.attach) and keeps_sessions(arguments)
    arguments.keep_tree |= arguments.sessions
    can_score = bool(arguments.plain_url) if arguments.attach else computed and not arguments.stock
    if arguments.attach and (arguments.beside or arguments.recompute):
        parser.error("--beside and --recompute start servers: not with --attach, name one by --plain-url")
    if (arguments.beside or arguments.recompute) and not can_score:
        parser.error("--beside and --recompute are for scored answers (--plain, --transfer nixl)")
    if arguments.score and not can_score:
        parser.error(
            "--score: without a real cache of the prompt (--plain, --transfer nixl, --plain-url) it is nothing"
        )
    wanted = SCORED if arguments.score is None else arguments.score
    arguments.score = min(wanted, arguments.requests) if can_score else 0
    if arguments.choices:
        if arguments.attach or not arguments.score:
            parser.error("--choices: of scored answers of servers started here (--plain, --transfer nixl)")
        arguments.row = choices.Shape.of(arguments.model_path)
        arguments.server.insert(0, choices.SWITCH)
        arguments.zero = [*arguments.zero, CHOICES]
    arguments.beside |= arguments.plain and bool(arguments.score) and not arguments.attach  # a start takes a minute
    return arguments


def keeps_sessions(arguments: argparse.Namespace) -> bool:
    """Returns whether the server that prefills may keep sessions: by default a plain one with its tree does."""
    given = read_settings().sessions
    return given.kept and (given.asked or (arguments.plain and arguments.keep_tree))


def stall_ms(answers: list[Answer], retracts: int) -> float:
    """Returns the cost of a retract to its request: the median of the longest gaps between tokens, one a retract."""
    longest = sorted((gap for answer in answers for gap in answer.gaps_ms), reverse=True)[:retracts]
    return statistics.median(longest) if longest else 0.0


def judge(found: Found, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the bounds of a run with retracts."""
    log, counted = found.log, found.run.summary()
    asked, refused = counted["asked"], min(counted["refused"], arguments.may_refuse)
    bounds = [
        results.bound(f"whole answers, of {asked}", f">= {asked - refused}", counted["whole"]),
        results.bound("server alive at the end", ">= 1", int(found.alive)),
        results.bound("copies alive at the end", "<= 0", log["copies_alive_at_end"]),
        results.bound("ranks that said what they decided", f">= {servers.ranks(arguments.server)}", log["ranks"]),
        results.bound("ranks that decided otherwise than the first", "<= 0", log["ranks_apart"]),
    ]
    bounds += judge_plain(log, arguments) if arguments.plain else judge_decode(log, arguments)
    bounds += judge_sessions(log, arguments) if arguments.sessions and "sessions" in log else []
    if arguments.falls_back:
        reason = arguments.falls_back
        number = log["fallbacks"].get(reason, 0)
        bounds.append(results.bound(f"retracts without a copy because of {reason}", ">= 1", number))
    if not arguments.stock and not arguments.attach:
        bounds.append(results.bound("metrics of this package", ">= 1", int("held_bytes_at_end" in log)))
    if "store_kills" in log:
        bounds.append(results.bound("store processes killed", ">= 1", log["store_kills"]))
    if "held_bytes_at_end" in log:
        bounds.append(results.bound("host memory held at the end, bytes", "<= 0", log["held_bytes_at_end"]))
    if "trouble" in log:  # only a log tells
        bounds.append(results.bound("trouble in the log", "<= 0", len(log["trouble"])))
    if arguments.verify and not arguments.stock:
        not_compared = log["loads"] - log.get("verified", 0)
        bounds.append(results.bound("loads not compared with their copy", "<= 0", not_compared))
    way = None if arguments.attach or arguments.stock else os.environ.get("DSV4_PREP")
    if way == "auto":
        made = sum(log.get("prep_steps", {}).values()) + log.get("graph_prep", 0)
        bounds.append(results.bound("eager steps, or ranks' graphs, whose metadata is made here", ">= 1", made))
    return bounds


def judge_decode(log: dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the bounds of a decode server, which loads every copy."""
    bounds = [results.bound("retracts with a copy", f">= {arguments.at_least}", log["saves"])]
    if not arguments.may_refuse:
        bounds.append(results.bound("saves without a load", "<= 0", abs(log["saves"] - log["loads"])))
    return bounds


def judge_plain(log: dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the bounds of a plain server, which counts the reason for each copy that it does not load."""
    explained = log["loads"] + sum(log["fallbacks"].values())
    bounds = [
        results.bound("retracts", f">= {arguments.at_least}", log["engine_retracts"]),
        results.bound("retracts with neither a load nor a reason", "<= 0", log["engine_retracts"] - explained),
    ]
    if "sessions" not in log:  # with them the prefix tree has the prompts, and mostly no more is needed
        share = log["loads"] / max(1, explained)
        bounds.append(results.bound("retracts answered by a load, share", f">= {LOADED_SHARE}", share))
    return bounds


def judge_sessions(log: dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the bounds of a server that keeps sessions, whose counts were read after a flush."""
    found = log.get("sessions", {})
    hits, later = sum(found.get("hits", {}).values()), arguments.requests * (arguments.turns - 1)
    bounds = [
        results.bound("sessions kept at the end of the run, points", ">= 1", found.get("points_before", 0)),
        results.bound("points left after a flush", "<= 0", found.get("points", 0)),
        results.bound("bytes of sessions left after a flush", "<= 0", found.get("bytes", 0)),
        results.bound(
            "points loaded that their request did not find", "<= 0", found.get("fallbacks", {}).get(NOT_MATCHED, 0)
        ),
    ]
    if later:
        bounds.append(results.bound("later turns that went on from a session, share", f">= {WENT_ON}", hits / later))
    if arguments.verify:
        not_compared = hits - found.get("verified", 0)
        bounds.append(results.bound("loads of sessions not compared with their copy", "<= 0", not_compared))
    return bounds


def judge_cache(run: Run, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the bounds of scored turns that go on from earlier ones: they read a cache, with HiCache the host's."""
    _, answers = run.last_turns(arguments.score)
    share = sum(answer.cached for answer in answers) / max(1, sum(answer.prompt for answer in answers))
    bounds = [results.bound("tokens of the scored prompts that were cached, share", f">= {CACHED}", share)]
    if servers.HICACHE in arguments.server:
        brought = sum(answer.on_host for answer in run.answers)
        bounds.append(results.bound("tokens of prompts that HiCache brought from the host", ">= 1", brought))
    return bounds


def score_rows(found: Found, arguments: argparse.Namespace, urls: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns the scores of the last answers: of plain servers, after retracts, and with each family zeroed."""
    runs = {score.RETRACTS: found.run} | found.again
    if not arguments.choices:
        return score.score_all(arguments, urls, runs)
    return score.score_all(arguments, urls, runs, choices.Control(urls[score.CONTROL], arguments).compared)


def main(argv: Sequence[str] | None = None, load_of: Callable[[argparse.Namespace], Load] = Load.of) -> int:
    """Returns exit status 1 when a bound is missed. Raises SaysNothing when a server to attach to says nothing of
    retracts.

    load_of: the requests of a command line.
    """
    arguments = parse(argv)
    servers.end_when_told()
    load = load_of(arguments)
    with score.PlainServers(arguments) as plain:
        found = run(arguments, load, plain)
        rows, bounds = judged(found, arguments)
        if arguments.score:
            scores = score_rows(found, arguments, plain.urls())
            results.show(scores)
            rows += scores
            bounds += score.judge(scores, arguments.score, within=arguments.within)
            bounds += judge_cache(found.run, arguments) if arguments.turns > 1 else []
            if arguments.choices:
                wrong = choices.misshapen(found.run.answers, arguments.row)
                bounds += choices.judge(scores, arguments.score, wrong)
    return results.finish(arguments, rows, bounds)


def run(arguments: argparse.Namespace, load: Load, plain: score.PlainServers) -> Found:
    """Runs the load over servers that run, or that are started; a plain one is warmed up with those beside it."""
    if arguments.attach:
        return attach_and_run(arguments, load)
    return serve_and_run(arguments, load, list(plain.started.values()) if arguments.plain else ())


def judged(found: Found, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Shows the row of the run with retracts; returns row and bounds."""
    stall = stall_ms(found.run.answers, found.log["engine_retracts"])
    rows = [{"run": "retracts", **found.run.summary(), "stall_p50_ms": stall, **found.log, "exit": found.exit}]
    results.show(rows)
    return rows, judge(found, arguments)

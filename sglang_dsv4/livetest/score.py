"""Scores answers: how likely a plain server finds each token behind its prompt (teacher-forced, one prefill).

Equal tokens cannot be asked for: batches differ from run to run, rounding with them, and one other token changes all
that follow. Rounding moves the mean by a tenth or two; a cache family that a load lost moves it by far more, as the
same run shows with one that it zeroes. Nothing of it means anything over the fake transfer, whose prompt has no cache.

With two requests at a time most answers repeat themselves token by token, and then tokens tell something as well: how
many a family changes that matters little, and how many stock's recompute changes.
"""

from __future__ import annotations

import http.client
import itertools
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sglang_dsv4.bench import results
from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.load import Answer, Load, Run
from sglang_dsv4.livetest.zeroing import CHOICES, OFF

UNLIKELY = -4.0  # the log probability of a token that the model would hardly say
# How far the mean, and the share of unlikely tokens, may be from the control's.
MEAN_SLACK, UNLIKELY_SLACK = 0.5, 0.02
CONTROL, RETRACTS = "control", "retracts"
CONTROL_AGAIN, RETRACTS_AGAIN = "control again", "retracts again"
RECOMPUTED = "retracts of a plain stock server, which computes again"
UNDISTURBED = "a stock server with HiSparse, no retracts"  # the control has none
DAMAGED = " zeroed"  # ends the name of a run that lost a family
ERRORS = 3  # standard errors by which a damaged run must fall
# From the port of a plain server: one that is tested may run beside them.
APART, RECOMPUTED_APART, UNDISTURBED_APART = 30, 31, 32


def words(arguments: Namespace) -> dict[str, str]:
    """Returns the runs of the scored requests after the first one: the word of the zeroing switch by name."""
    zeroed = {f"{family}{DAMAGED}": family for family in arguments.zero}
    return {RETRACTS_AGAIN: OFF, **zeroed} if arguments.score else {}


def read(
    url: str, prompt: Sequence[int], answer: Sequence[int], timeout: float, more: Mapping[str, Any] | None = None
) -> tuple[list[float], int]:
    """Returns the log probability of each token of ``answer`` behind ``prompt``, by the server at ``url``, and how many
    tokens it found in its prefix tree: none behind ``prompt``. more: fields of the request's body.

    Raises OSError where it does not answer, ValueError where it does not answer the question.
    """
    body = {
        "input_ids": [*prompt, *answer],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": len(prompt) - 1,
        **(more or {}),
    }
    said = servers.post(url, "/generate", body, timeout)
    listed = said["meta_info"]["input_token_logprobs"]  # [log probability, token, text]; the first has nothing before
    # Both lines say 0 for the vocabulary's last token.
    same = [said in (token, 0) for (_, said, *_), token in zip(listed, [prompt[-1], *answer], strict=True)]
    values = [value for value, *_ in listed[1:]]
    if not all(same) or None in values:
        raise ValueError(f"{url} does not score the tokens that it was given: {str(listed)[:300]}")
    return values, int(said["meta_info"].get("cached_tokens", 0))


def score_each(url: str, load: Load, answers: Sequence[Answer], timeout: float, at_once: int = 1) -> list[list[float]]:
    """Returns the log probabilities of each answer's tokens, ``at_once`` together; none of an answer that cannot be
    scored, which is said.
    """

    def score_of(prompt: Sequence[int], answer: Answer) -> list[float]:
        if answer.outcome != "whole":
            return []
        try:
            return read(url, prompt, answer.tokens, timeout)[0]
        except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
            print(f"  not scored: {type(error).__name__}: {error}", flush=True)
            return []

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(score_of, load.prompts, answers))


def summary(name: str, each: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Returns the row of a run whose answers have these scores."""
    values = list(itertools.chain.from_iterable(each))
    return {
        "run": f"score of {name}",
        "answers": sum(map(bool, each)),
        "tokens": len(values),
        "mean": statistics.mean(values) if values else 0.0,
        "lowest": min(values, default=0.0),
        "unlikely": sum(value < UNLIKELY for value in values) / max(1, len(values)),
    }


def fall(each: Sequence[Sequence[float]], whole: Sequence[Sequence[Sequence[float]]]) -> dict[str, float]:
    """Returns how far one request's answers fall below those of undamaged runs: the mean, and its standard error."""
    pairs = [
        statistics.mean(given) - statistics.mean(map(statistics.mean, others))
        for given, *others in zip(each, *whole, strict=True)
        if given and all(others)
    ]
    spread = statistics.stdev(pairs) if len(pairs) > 1 else 0.0
    return {"fall": statistics.mean(pairs) if pairs else 0.0, "fall_error": spread / max(1, len(pairs)) ** 0.5}


class PlainServers:
    """Runs servers of the same model without this package: a quiet one, and with ``--recompute`` one that retracts.

    The quiet one is ``--plain-url``, where that is given. It scores, and has no HiSparse: with it the engine keeps
    pages of each request that ends with its prefill, as scored ones do, until none is left. So where HiSparse is
    tested, one more has it, whose answers are scored. Started at once with ``--beside``, else by ``urls``.
    """

    def __init__(self, arguments: Namespace) -> None:
        self.arguments = arguments
        self.started: dict[str, servers.Server] = {}

    def __enter__(self) -> PlainServers:
        try:
            if self.arguments.beside:
                self._start()
        except BaseException:  # the second has no port: the first must not stay
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        servers.stop_all(list(self.started.values()))

    def urls(self) -> dict[str, str]:
        """Returns their addresses by run, once they are up."""
        if self.arguments.plain_url:
            return {CONTROL: self.arguments.plain_url}
        if not self.started:
            self._start()
        servers.wait_until_up(list(self.started.values()), self.arguments.patience)
        return {name: server.url for name, server in self.started.items()}

    def _start(self) -> None:
        given = self.arguments
        without = without_hisparse(given.server)
        self.started[CONTROL] = launch_stock(given, "plain", {}, APART, without)
        if without != list(given.server):
            self.started[UNDISTURBED] = launch_stock(given, "undisturbed", {}, UNDISTURBED_APART, given.server)
        if given.recompute:
            retracts = servers.forced_retracts(given.interval)
            self.started[RECOMPUTED] = launch_stock(given, "recompute", retracts, RECOMPUTED_APART, without)


def launch_stock(
    given: Namespace, folder: str, more: Mapping[str, str], apart: int, words: Sequence[str]
) -> servers.Server:
    """Returns a plain server of the same model without this package, started and not yet up; it may stand beside
    others.

    words: its arguments.
    """
    environment = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.models", "DSV4_ENABLED": "0"}  # its seeded weights
    logs = given.logs / f"{given.name}-{folder}"
    return servers.launch("plain", given.model_path, words, environment | dict(more), logs, apart=apart)


def without_hisparse(words: Sequence[str]) -> list[str]:
    """Returns server arguments without those that turn HiSparse on."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--enable-hisparse", action="store_true")
    parser.add_argument("--hisparse-config")
    return parser.parse_known_args(words)[1]


def score_all(
    arguments: Namespace,
    urls: Mapping[str, str],
    runs: Mapping[str, Run],
    more: Callable[[Load, Sequence[Answer]], Mapping[str, Any]] = lambda load, answers: {},
) -> list[dict[str, Any]]:
    """Returns a row for the last turns of each of ``runs``, behind one for the plain servers' own answers to those of
    RETRACTS, the control's first.

    Each answer is scored behind its own conversation. Where a run's prompts are those of RETRACTS, its row says how
    many of its answers, and of their tokens, are unlike the control's and unlike those. more: makes further columns.
    """
    where = dict(urls) | ({CONTROL_AGAIN: urls[CONTROL]} if RECOMPUTED in urls else {})
    asked, _ = runs[RETRACTS].last_turns(arguments.score)
    given = {name: Run(asked, arguments, url, None, None).execute(name) for name, url in where.items()} | dict(runs)
    last = {name: run.last_turns(arguments.score) for name, run in given.items()}
    each = {name: score_each(urls[CONTROL], *turns, arguments.timeout) for name, turns in last.items()}
    whole = [each[name] for name in (RETRACTS, RETRACTS_AGAIN) if name in each]
    rows = []
    for name, (load, answers) in last.items():
        row = summary(name, each[name]) | (fall(each[name], whole) if name.endswith(DAMAGED) else {})
        if name == RETRACTS and UNDISTURBED in each:
            row |= fall(each[name], [each[UNDISTURBED]])
        for other in (CONTROL, RETRACTS) if load == asked else ():
            row |= unlike(other, last[other][1], answers)
        rows.append(row | dict(more(load, answers)))
    return rows


def unlike(name: str, first: Sequence[Answer], second: Sequence[Answer]) -> dict[str, int]:
    """Counts answers, and tokens at the same place of both, that differ; of requests whose both answers are whole."""
    pairs = [
        [one != other for one, other in zip(a.tokens, b.tokens, strict=False)]
        for a, b in zip(first, second, strict=True)
        if a.outcome == b.outcome == "whole"
    ]
    return {f"answers_unlike_{name}": sum(map(any, pairs)), f"tokens_unlike_{name}": sum(map(sum, pairs))}


def judge(
    rows: Sequence[dict[str, Any]], wanted: int, alike: Mapping[str, str] | None = None, within: float = MEAN_SLACK
) -> list[dict[str, Any]]:
    """Judges answers: the runs ``alike`` are as likely as the control's; those of a damaged run are not.

    alike: how a bound calls each of them, by its name; without it, those after retracts. within: how far their mean
    may lie below the control's. The first damaged run must
    fall far: it shows that the check can fail. Any other may lose a family that matters little: request by request, it
    must fall below the undamaged runs by more than chance.
    """
    by_name = {row["run"].removeprefix("score of "): row for row in rows}
    control = by_name.pop(CONTROL)
    for unjudged in (CONTROL_AGAIN, RETRACTS_AGAIN, RECOMPUTED, f"{CHOICES}{DAMAGED}"):  # choices say no token
        by_name.pop(unjudged, None)
    undisturbed = by_name.pop(UNDISTURBED, None)
    least, damaged = (f"{control['mean'] - slack:.4f}" for slack in (within, MEAN_SLACK))
    most = f"{control['unlikely'] + UNLIKELY_SLACK:.4f}"
    bounds = [results.bound("answers scored, of the control", f">= {wanted}", control["answers"])]
    for name, called in ({RETRACTS: "after retracts"} if alike is None else alike).items():
        row = by_name.pop(name)
        bounds += [
            results.bound(f"answers scored, {called}", f">= {wanted}", row["answers"]),
            results.bound(f"mean log probability of a token, {called}", f">= {least}", row["mean"]),
            results.bound(f"share of tokens below {UNLIKELY:g}, {called}", f"<= {most}", row["unlikely"]),
        ]
        if undisturbed is not None:
            worst = row["fall"] + ERRORS * row["fall_error"]
            bounds += [
                results.bound(f"answers scored, of {UNDISTURBED}", f">= {wanted}", undisturbed["answers"]),
                results.bound(f"fall below {UNDISTURBED}, and {ERRORS} standard errors, {called}", ">= 0", worst),
            ]
    for number, (name, row) in enumerate(by_name.items()):
        if number == 0:
            bounds.append(results.bound(f"mean log probability of a token, {name}", f"<= {damaged}", row["mean"]))
        else:
            worst = row["fall"] + ERRORS * row["fall_error"]
            bounds.append(results.bound(f"fall and {ERRORS} standard errors, {name}", "<= -0.0001", worst))
    return bounds

"""Are an answer's tokens those that the model means to say? Equal tokens cannot be asked for: batches differ from run
to run, rounding with them, and one other token changes all that follow.

The teacher-forced score can tell. A plain server reads prompt and answer in one prefill and says how likely each token
of the answer was. Rounding moves the mean by a tenth or two; a cache family that a load lost moves it by far more, as
the same run shows with one that it zeroes. Nothing of it means anything over the fake transfer, whose prompt has no
cache.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import statistics
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sglang_dsv4.bench import results
from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.load import Answer, Load, Run

UNLIKELY = -4.0  # the log probability of a token that the model would hardly say
# How far the mean, and the share of unlikely tokens, may be from the control's.
MEAN_SLACK, UNLIKELY_SLACK = 0.5, 0.02
CONTROL, RETRACTS = "control", "retracts"
APART = 30  # from the port of a plain server: one that is tested may run beside the control


def teacher_forced(url: str, prompt: Sequence[int], answer: Sequence[int], timeout: float) -> list[float]:
    """The log probability of each token of ``answer`` behind ``prompt``, by the server at ``url``.

    Raises as ``read``.
    """
    return read(url, prompt, answer, timeout)[0]


def read(url: str, prompt: Sequence[int], answer: Sequence[int], timeout: float) -> tuple[list[float], int]:
    """As ``teacher_forced``, and how many tokens the server found in its prefix tree: none behind ``prompt``.

    Raises OSError where it does not answer, ValueError where it does not say what was asked.
    """
    body = {
        "input_ids": [*prompt, *answer],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": len(prompt) - 1,
    }
    said = servers.post(url, "/generate", body, timeout)
    listed = said["meta_info"]["input_token_logprobs"]  # [log probability, token, text]; the first has nothing before
    # Both lines say 0 for the vocabulary's last token.
    same = [said in (token, 0) for (_, said, *_), token in zip(listed, [prompt[-1], *answer], strict=True)]
    values = [value for value, *_ in listed[1:]]
    if not all(same) or None in values:
        raise ValueError(f"{url} does not score the tokens that it was given: {str(listed)[:300]}")
    return values, int(said["meta_info"].get("cached_tokens", 0))


def scored(
    name: str, url: str, load: Load, answers: Sequence[Answer], timeout: float, at_once: int = 1
) -> dict[str, Any]:
    """The row of a run: its finished answers scored, ``at_once`` together. What cannot be scored is said."""

    def score_of(prompt: Sequence[int], answer: Answer) -> list[float]:
        if answer.outcome != "finished":
            return []
        try:
            return teacher_forced(url, prompt, answer.tokens, timeout)
        except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
            print(f"  not scored: {type(error).__name__}: {error}", flush=True)
            return []

    with ThreadPoolExecutor(at_once) as pool:
        each = [found for found in pool.map(score_of, load.prompts, answers) if found]
    values = list(itertools.chain.from_iterable(each))
    return {
        "run": f"score of {name}",
        "answers": len(each),
        "tokens": len(values),
        "mean": statistics.mean(values) if values else 0.0,
        "lowest": min(values, default=0.0),
        "unlikely": sum(value < UNLIKELY for value in values) / max(1, len(values)),
    }


@contextlib.contextmanager
def control_server(arguments: Namespace) -> Iterator[servers.Server]:
    """A quiet server of the same model without this package, started and not yet up; it may stand beside others."""
    environment = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.models", "DSV4_ENABLED": "0"}  # its seeded weights
    folder = arguments.logs / f"{arguments.name}-plain"
    server = servers.launch("plain", arguments.model_path, arguments.server, environment, folder, apart=APART)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def plain_server(arguments: Namespace) -> Iterator[str]:
    """The address of a control server that is up: ``--plain-url``, or one started here."""
    if arguments.plain_url:
        yield arguments.plain_url
        return
    with control_server(arguments) as server:
        servers.wait_until_up([server], arguments.patience)
        yield server.url


def score_all(arguments: Namespace, load: Load, runs: Mapping[str, Sequence[Answer]]) -> list[dict[str, Any]]:
    """A row for the plain server's own answers to ``load``, the control, and one for those of each of ``runs``."""
    with plain_server(arguments) as url:
        control = Run(load, arguments, url, None, None).execute(CONTROL)
        given = {CONTROL: control.answers, **runs}
        return [scored(name, url, load, answers, arguments.timeout) for name, answers in given.items()]


def judge(rows: Sequence[dict[str, Any]], wanted: int, alike: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Answers of the runs ``alike`` are as likely as the control's; those of any other, which were damaged, are not.

    alike: how a bound calls each of them, by its name; without it, those after retracts.
    """
    by_name = {row["run"].removeprefix("score of "): row for row in rows}
    control = by_name.pop(CONTROL)
    least = f"{control['mean'] - MEAN_SLACK:.4f}"
    most = f"{control['unlikely'] + UNLIKELY_SLACK:.4f}"
    bounds = [results.bound("answers scored, of the control", f">= {wanted}", control["answers"])]
    for name, called in ({RETRACTS: "after retracts"} if alike is None else alike).items():
        row = by_name.pop(name)
        bounds += [
            results.bound(f"answers scored, {called}", f">= {wanted}", row["answers"]),
            results.bound(f"mean log probability of a token, {called}", f">= {least}", row["mean"]),
            results.bound(f"share of tokens below {UNLIKELY:g}, {called}", f"<= {most}", row["unlikely"]),
        ]
    for name, row in by_name.items():
        bounds.append(results.bound(f"mean log probability of a token, {name}", f"<= {least}", row["mean"]))
    return bounds

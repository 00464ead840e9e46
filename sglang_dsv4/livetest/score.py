"""Are an answer's tokens those that the model means to say? Equal tokens cannot be asked for: batches differ from run
to run, rounding with them, and one other token changes all that follow.

The teacher-forced score can tell. A plain server reads prompt and answer in one prefill and says how likely each token
of the answer was. Rounding moves the mean by a tenth or two; a cache family that a load lost moves it by far more, as
the same run shows with one that it zeroes. Nothing of it means anything over the fake transfer, whose prompt has no
cache.

With two requests at a time most answers repeat themselves token by token, and then tokens tell something as well: how
many a family changes that matters little, and how many stock's recompute changes.
"""

from __future__ import annotations

import http.client
import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_dsv4.bench import results
from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.load import Answer, Load, Run
from sglang_dsv4.livetest.zeroing import OFF

UNLIKELY = -4.0  # the log probability of a token that the model would hardly say
# How far the mean, and the share of unlikely tokens, may be from the control's.
MEAN_SLACK, UNLIKELY_SLACK = 0.5, 0.02
CONTROL, RETRACTS = "control", "retracts"
CONTROL_AGAIN, RETRACTS_AGAIN = "control again", "retracts again"
RECOMPUTED = "retracts of a plain stock server, which computes again"
APART = 1  # of that server's port, from the control's


def words(arguments: Namespace) -> dict[str, str]:
    """The runs of the scored requests after the first one: the word of the zeroing switch by name."""
    zeroed = {f"{family} zeroed": family for family in arguments.zero}
    return {RETRACTS_AGAIN: OFF, **zeroed} if arguments.score else {}


def teacher_forced(url: str, prompt: Sequence[int], answer: Sequence[int], timeout: float) -> list[float]:
    """The log probability of each token of ``answer`` behind ``prompt``, by the server at ``url``.

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
    return values


def scored(name: str, url: str, load: Load, answers: Sequence[Answer], timeout: float) -> dict[str, Any]:
    """The row of a run: its finished answers scored one at a time. What cannot be scored is said and counted."""
    values: list[float] = []
    count = 0
    for prompt, answer in zip(load.prompts, answers, strict=True):
        if answer.outcome != "finished":
            continue
        try:
            values += teacher_forced(url, prompt, answer.tokens, timeout)
        except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
            print(f"  not scored: {type(error).__name__}: {error}", flush=True)
            continue
        count += 1
    return {
        "run": f"score of {name}",
        "answers": count,
        "tokens": len(values),
        "mean": statistics.mean(values) if values else 0.0,
        "lowest": min(values, default=0.0),
        "unlikely": sum(value < UNLIKELY for value in values) / max(1, len(values)),
    }


class PlainServers:
    """Servers of the same model without this package: a quiet one, and with ``--recompute`` one that retracts.

    The quiet one is ``--plain-url``, where that is given. Started at once with ``--beside``, else by ``urls``.
    """

    def __init__(self, arguments: Namespace) -> None:
        self.arguments = arguments
        self.started: dict[str, servers.Server] = {}

    def __enter__(self) -> PlainServers:
        if self.arguments.beside:
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        servers.stop_all(list(self.started.values()))

    def urls(self) -> dict[str, str]:
        """Their addresses by run, once they are up."""
        if self.arguments.plain_url:
            return {CONTROL: self.arguments.plain_url}
        if not self.started:
            self._start()
        servers.wait_until_up(list(self.started.values()), self.arguments.patience)
        return {name: server.url for name, server in self.started.items()}

    def _start(self) -> None:
        self._launch(CONTROL, "plain", {}, 0)
        if self.arguments.recompute:
            self._launch(RECOMPUTED, "recompute", servers.forced_retracts(self.arguments.interval), APART)

    def _launch(self, name: str, folder: str, more: dict[str, str], apart: int) -> None:
        given = self.arguments
        environment = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.models", "DSV4_ENABLED": "0"}  # its seeded weights
        self.started[name] = servers.launch(
            "plain", given.model_path, given.server, environment | more, given.logs / f"{given.name}-{folder}",
            apart=apart,
        )  # fmt: skip


def score_all(
    arguments: Namespace, load: Load, urls: Mapping[str, str], runs: Mapping[str, Sequence[Answer]]
) -> list[dict[str, Any]]:
    """A row for the plain servers' own answers to ``load``, the control's first, and one for those of each of ``runs``.

    ``runs`` has RETRACTS; each row says how many of its answers, and of their tokens, are unlike the control's and
    unlike those.
    """
    where = dict(urls) | ({CONTROL_AGAIN: urls[CONTROL]} if RECOMPUTED in urls else {})
    given: dict[str, Sequence[Answer]] = {
        name: Run(load, arguments, url, None, None).execute(name).answers for name, url in where.items()
    }
    rows = []
    for name, answers in (given := given | dict(runs)).items():
        row = scored(name, urls[CONTROL], load, answers, arguments.timeout)
        for other in (CONTROL, RETRACTS):
            row |= unlike(other, given[other], answers)
        rows.append(row)
    return rows


def unlike(name: str, first: Sequence[Answer], second: Sequence[Answer]) -> dict[str, int]:
    """How many answers, and how many tokens at the same place of both, differ; of those that finished twice."""
    pairs = [
        [one != other for one, other in zip(a.tokens, b.tokens, strict=False)]
        for a, b in zip(first, second, strict=True)
        if a.outcome == b.outcome == "finished"
    ]
    return {f"answers_unlike_{name}": sum(map(any, pairs)), f"tokens_unlike_{name}": sum(map(sum, pairs))}


def judge(rows: Sequence[dict[str, Any]], wanted: int) -> list[dict[str, Any]]:
    """Answers after retracts are as likely as the control's; those with a family zeroed are not.

    The first such row must fall far: it shows that the check can fail. Any other may lose a family that matters little:
    it must fall below each undamaged run, and change more answers than a repetition does.
    """
    by_name = {row["run"].removeprefix("score of "): row for row in rows}
    control, retracts = by_name[CONTROL], by_name[RETRACTS]
    least = f"{control['mean'] - MEAN_SLACK:.4f}"
    bounds = [
        results.bound("answers scored, of the control", f">= {wanted}", control["answers"]),
        results.bound("answers scored, after retracts", f">= {wanted}", retracts["answers"]),
        results.bound("mean log probability of a token, after retracts", f">= {least}", retracts["mean"]),
        results.bound(
            f"share of tokens below {UNLIKELY:g}, after retracts", f"<= {control['unlikely'] + UNLIKELY_SLACK:.4f}",
            retracts["unlikely"],
        ),
    ]  # fmt: skip
    whole = min(by_name[name]["mean"] for name in (CONTROL, CONTROL_AGAIN, RETRACTS, RETRACTS_AGAIN) if name in by_name)
    zeroed = [name for name in by_name if name.endswith(" zeroed")]
    for name in zeroed:
        most = least if name == zeroed[0] else f"{whole:.4f}"
        bounds.append(results.bound(f"mean log probability of a token, {name}", f"<= {most}", by_name[name]["mean"]))
        if RETRACTS_AGAIN in by_name:
            repeated, changed = (by_name[run]["answers_unlike_retracts"] for run in (RETRACTS_AGAIN, name))
            bounds.append(results.bound(f"answers changed, {name}", f">= {min(repeated + 1, wanted)}", changed))
    return bounds

"""All questions to one server, some at a time: a row of result for each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from gsm8k.endpoints import Asking, Endpoint, generate
from gsm8k.errors import RequestFailed
from gsm8k.progress import progress
from gsm8k.questions import STOP, Question, digest, last_number


def ask(endpoint: Endpoint, question: Question, asking: Asking) -> dict[str, Any]:
    """One answer: its number, is it right, seconds, what the server states. ``ok`` is None for a failure."""
    started = time.perf_counter()
    try:
        found = generate(endpoint, question.prompt, asking)
    except RequestFailed as error:
        return {"answer": None, "ok": None, "latency_s": round(time.perf_counter() - started, 4), "error": str(error)}
    text = found.pop("text")
    answer = last_number(text.split(STOP)[0])
    row = {
        "answer": answer, "ok": answer == question.gold, "latency_s": round(time.perf_counter() - started, 4),
        "text_sha256": digest(text),
    }  # fmt: skip
    row |= {name: value for name, value in found.items() if value is not None}
    return row | ({"text": text} if asking.keep_text else {})


def ask_all(
    endpoint: Endpoint, questions: Sequence[Question], asking: Asking, concurrency: int
) -> tuple[list[dict[str, Any]], float]:
    """Answers in the order of the questions, at most ``concurrency`` asked at once; seconds that all took."""
    started = time.perf_counter()
    pool = ThreadPoolExecutor(concurrency)
    try:
        futures = [pool.submit(ask, endpoint, question, asking) for question in questions]
        with progress(endpoint.url, len(questions)) as advance:
            for future in as_completed(futures):
                future.result()
                advance()
    finally:
        pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures], time.perf_counter() - started

"""Starts the servers of a test with the model that SERVER_MODEL names, and stops them whatever happens.

    SERVER_MODEL=FOLDER make test-server [ARGS=test/server/test_weights.py]

SERVER_ARGUMENTS: more arguments of each server. Their logs lie in pytest's temporary folder, which a failure names.
"""

import argparse
import os
import shlex

import pytest

from sglang_dsv4.bench import results
from sglang_dsv4.livetest import servers


@pytest.fixture
def arguments(tmp_path):
    """The options of a ``Load`` and a ``Run``, and the folder of the logs."""
    return argparse.Namespace(
        model=servers.model_path(os.environ["SERVER_MODEL"]), logs=tmp_path, seed=1, timeout=120, vocabulary=2000,
        requests=150, concurrency=16, prompt=(200, 1500), new_tokens=(300, 800),
    )  # fmt: skip


@pytest.fixture
def start(arguments):
    """Starts a server; they are stopped, all at once, behind the test."""
    started = []

    def launch(role, words, environment, **more):
        given = [*words, *shlex.split(os.environ.get("SERVER_ARGUMENTS", ""))]
        started.append(servers.launch(role, arguments.model, given, environment, arguments.logs, **more))
        return started[-1]

    yield launch
    servers.stop_all(started)


@pytest.fixture
def require():
    """Prints what was seen; fails with every bound that is missed."""

    def check(rows, bounds):
        results.show(rows)
        assert [bound for bound in bounds if not bound["ok"]] == []

    return check

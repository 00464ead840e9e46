"""Two starts of one model differ less than two machines do: a server with this package and stock stand on one card."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

from sglang_dsv4.livetest import score, servers
from sglang_dsv4.livetest.load import warm_up

PACKAGE, STOCK = "with this package", "stock"


@contextlib.contextmanager
def package_and_stock(arguments: argparse.Namespace) -> Iterator[tuple[servers.Server, servers.Server]]:
    """Two plain servers of one model and the same arguments, up and warm: with this package, and DSV4_ENABLED=0.

    Raises ServerDied.
    """
    ours = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.models", "DSV4_ENABLED": "1"}
    with contextlib.ExitStack() as stack:
        stock = stack.enter_context(score.control_server(arguments))
        folder = arguments.logs / arguments.name
        package = servers.launch("plain", arguments.model_path, arguments.server, ours, folder)
        stack.callback(package.stop)
        servers.wait_until_up([package, stock], arguments.patience)
        warm_up([package.url, stock.url], arguments.vocabulary, arguments.timeout)
        yield package, stock


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every script here needs that is given a model."""
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=420, help="seconds for the servers to come up")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one request")

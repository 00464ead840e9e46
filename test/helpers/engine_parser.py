"""Has the engine make its parser of arguments once: that takes longer than all that a test reads by it."""

import functools
from argparse import ArgumentParser

from sglang.srt.server_args import ServerArgs

_fill = ServerArgs.add_cli_args


@functools.cache
def _filled() -> ArgumentParser:
    parser = ArgumentParser()
    _fill(parser)
    return parser


def keep_parser() -> None:
    """From now on parsers of the engine's arguments share one set of them, which nobody adds to."""
    ServerArgs.add_cli_args = staticmethod(lambda parser: vars(parser).update(vars(_filled()) | {"prog": parser.prog}))

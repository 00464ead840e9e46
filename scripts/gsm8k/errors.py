"""What ends a run before it starts, and what ends one request."""

from __future__ import annotations


class Refused(Exception):
    """The run cannot start; the message names the flag to change."""


class RequestFailed(Exception):
    """One request has no answer."""

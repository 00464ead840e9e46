"""Keeps this package's state of the one server in a process, and of each request.

``server`` is the one of this process; the scheduler's thread owns it. ``request_state`` gives a request's own.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

NAME = "dsv4"  # attribute of a request


@dataclass
class DraftInputs:
    """Keeps the inputs of the drafts of the last step.

    copy_of: a request -> its host copy; None: nothing is kept. relay: the engine's buffers. step: the inputs. made: the
    event behind their gather. stream: sends them to the host. told: of one that could not be put back.
    """

    copy_of: Callable[[Any], Any] | None = None
    relay: Any = None
    step: Any = None
    made: Any = None
    stream: Any = None
    told: bool = False


@dataclass
class Server:
    """Keeps the state of this process's server.

    watched: the plugin waits for a pool. installation: of the hooks, once it was tried. scheduler: since the begin of
    its loop. weight_version: changes with each weight update. clean_version: that of all that lies in the cache, unless
    some of it was computed across an update. is_empty: whether no forward was launched since its last flush.
    early_stream: the stream of the forward that told the scheduler early that its tables are read; None where none
    does. draft_inputs: see ``drafts``. target_refused: the target's attention backend gets no metadata from here, so
    its draft's gets none either. early_store: a store's process, until the start is over. unheard: counts made before
    the scheduler, which has the metrics collector, began its loop.
    """

    watched: bool = False
    installation: Any = None
    scheduler: Any = None
    weight_version: int = 0
    clean_version: int = 0
    is_empty: Callable[[], bool] = lambda: False
    early_stream: Any = None
    draft_inputs: DraftInputs = field(default_factory=DraftInputs)
    target_refused: bool = False
    early_store: Any = None
    unheard: list[Any] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Returns whether the cache is of the present weights alone; requests that run on over an update mix it."""
        return self.weight_version == self.clean_version

    def wait_on_this_stream(self) -> None:
        """Lets the current stream wait for that forward: it still writes the pages and slot of a finished request.

        For all that gives pages and slots to another request. Without ``early_stream`` the engine's own barrier waits.
        """
        if self.early_stream is not None:
            import torch  # noqa: PLC0415 - the plugin imports this module in every process

            torch.cuda.current_stream().wait_stream(self.early_stream)

    def wait_on_the_host(self) -> None:
        """Lets the host wait for that forward, which still reads the weights: updates may come from other processes."""
        if self.early_stream is not None:
            self.early_stream.synchronize()


@dataclass
class SentBack:
    """Records a return. first_room: the transfer room that the request came with. times: how often it was sent back."""

    first_room: int
    times: int


@dataclass
class Counted:
    """Counts a request's penalties.

    tokens: those counted, one a step. back: it came back, and its next step decodes.
    """

    tokens: array[int] = field(default_factory=lambda: array("q"))
    back: bool = False


@dataclass
class RequestState:
    """Keeps the state of one request."""

    held: bool = False  # it has no copy, and is kept until its last step was streamed
    sent_back: SentBack | None = None  # to its prefill server
    prefill_rank: int | None = None  # of that server, which computed it
    draft_state: Any = None  # inputs of its next drafts, on their way to the host
    counted: Counted | None = None  # for its penalties
    restored: int | None = None  # tokens with which it came back on a plain server, while it publishes nothing
    namespace: Any = None  # its keys, and the name that sessions have for them
    found: Any = None  # its last look-up in the sessions
    hints: Any = None  # about its session
    ask: Any = None  # its question to the store
    chunks: list[int] = field(default_factory=list)  # where the chunks of its prefill began
    partial: Any = None  # the point without a window up to which its pages are kept
    too_long: bool = False  # its prompt found no room, so nothing of it is kept before its end
    point: Any = None  # the last one that it left in the sessions, or on a decode server
    placed: int | None = None  # tokens for which a decode server last gave it a row
    behind: Any = None  # the namespace of its points on a decode server
    from_store: bool = False  # what sessions brought back of its prefix came from a store
    on_device: int | None = None  # tokens of its prefix before sessions brought more back, until those are told


server = Server()


def request_state(req: Any) -> RequestState:
    """Returns the state of ``req``, made at the first call."""
    found: RequestState | None = getattr(req, NAME, None)
    if found is None:
        found = RequestState()
        setattr(req, NAME, found)
    return found

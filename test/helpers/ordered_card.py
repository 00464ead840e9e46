"""Plays a card on which each access of a tensor is held against vector clocks: by torch, a kernel or a copy.

``pretended_device`` moves bytes late and in any order, but a tensor that torch makes is ready there at once, and lives
as long as anything names it. Here everything runs at once, and these are found in whatever ran:

    a tensor that one stream makes or writes and another one uses, without an event between them
    memory that goes back to its stream's allocator while another stream may still use it
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from clocks import HOST, Clocks
from pretended_device import PlannedOnce
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sglang_dsv4.prep import builder
from sglang_dsv4.transfer import copier, locate
from sglang_dsv4.transfer.copier import Copier
from triton_ops.copy_pages import PageTable, copy_pages_torch
from triton_ops.copy_rows import copy_rows_torch
from triton_ops.locate import locate_torch
from triton_ops.prep_rows import prep_rows_torch
from triton_ops.tables import BufferTable


class Stream:
    """Names a stream. Its handle is a number, as a kernel takes it."""

    def __init__(self, card: OrderedCard, name: str) -> None:
        self._clocks, self.name = card.clocks, name
        self.cuda_stream = len(card.streams)
        card.streams.append(self)

    def wait_event(self, event: Event) -> None:
        self._clocks.learn(self.name, event.clock)

    def wait_stream(self, other: Stream) -> None:
        self._clocks.learn(self.name, self._clocks.now(other.name))

    def synchronize(self) -> None:
        self._clocks.learn(HOST, self._clocks.now(self.name))


class Event:
    """Records the clock of a stream; a wait is for the last record."""

    def __init__(self, card: OrderedCard) -> None:
        self._card = card
        self.clock: dict[str, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = self._card.clocks.now((stream or self._card.current).name)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._card.clocks.learn(HOST, self.clock)


class _Part(NamedTuple):
    """Names bytes of a memory that every access so far has used together."""

    memory: str
    first: int
    end: int

    def __str__(self) -> str:
        return f"bytes {self.first} to {self.end} of {self.memory}"


@dataclass(eq=False)
class _Memory:
    """Follows one storage. home: the stream that made it. address: of its first byte. recorded: by record_stream."""

    name: str
    home: str
    storage: StorageWeakRef
    address: int
    parts: list[_Part]
    recorded: set[str] = field(default_factory=set)

    def cut(self, clocks: Clocks, first: int, end: int) -> list[_Part]:
        """Returns the parts of the bytes from ``first`` to ``end``, cut there."""
        for at in (first, end):
            for number, part in enumerate(self.parts):
                if part.first < at < part.end:
                    halves = [part._replace(end=at), part._replace(first=at)]
                    clocks.cut(part, halves)
                    self.parts[number : number + 1] = halves
        return [part for part in self.parts if first <= part.first and part.end <= end]


class _Watch(TorchDispatchMode):
    """Tells the card of each operation of torch."""

    def __init__(self, card: OrderedCard) -> None:
        super().__init__()
        self._card = card

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads, writes, aliases = [], [], False
        for number, argument in enumerate(func._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            alias = argument.alias_info
            aliases = aliases or (alias is not None and not alias.is_write)
            if alias is None or alias.is_write:
                (reads if alias is None else writes).extend(_tensors(value))
        result = func(*args, **kwargs)
        if not aliases:  # a view uses nothing
            self._card.torch_ran(func, reads, writes, _tensors(result))
        return result


class _Pinned(TorchFunctionMode):
    """Tells the card of memory that torch makes on the host."""

    def __init__(self, card: OrderedCard) -> None:
        super().__init__()
        self._card = card

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self._card.making(HOST if kwargs.get("pin_memory") else None):
            return function(*args, **kwargs)


class OrderedCard:
    """Stands where the package takes ``torch.cuda``; see ``ordered_card``."""

    def __init__(self, monkeypatch: Any) -> None:
        self.clocks = Clocks()
        self.streams: list[Stream] = []
        self._memories: dict[int, _Memory] = {}
        self._numbers = itertools.count()
        self.main, self.forward = Stream(self, "main"), Stream(self, "forward")
        self.current = self.main
        self._maker: str | None = None  # of the next tensors, where it is not the current stream
        self._names: Iterator[str] = iter(())
        kernels = {
            (copier, "copy_pages"): (copy_pages_torch, lambda a: a[1:2] if a[4] else a[0].table.buffers),
            (copier, "copy_rows"): (copy_rows_torch, lambda a: a[1:2] if a[6] else a[0].buffers),
            (locate, "locate"): (locate_torch, lambda a: a[6:8]),
            (builder, "prep_rows"): (prep_rows_torch, lambda a: a[2:3]),
        }
        for (module, name), (op, written) in kernels.items():
            monkeypatch.setattr(module, name, self._launched(name, op, written))
        monkeypatch.setattr(copier, "RowTemplates", PlannedOnce)
        monkeypatch.setattr(copier, "copy_to_host", self._moved(device=1))
        monkeypatch.setattr(copier, "copy_to_device", self._moved(device=0))
        monkeypatch.setattr(torch.Tensor, "record_stream", _recorder(self))

    # what torch.cuda has

    def Stream(self, *_: Any, **__: Any) -> Stream:
        return Stream(self, next(self._names, f"stream {len(self.streams)}"))

    def Event(self, *_: Any, **__: Any) -> Event:
        return Event(self)

    def current_stream(self, *_: Any) -> Stream:
        return self.current

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    # what uses it

    def copier(self, buffers: Any, memory: Any) -> Copier:
        """Returns a Copier on this card; its loads wait for the ``forward`` stream."""
        self._names = iter(("kernels", "engine", "finder"))
        return Copier(buffers, memory, lambda: (self.forward,), cuda=self)

    def check(self) -> None:
        """Raises Race for memory that went back too early, as the next tensors of each stream would show."""
        for home in {memory.home for memory in self._memories.values()}:
            self._take_back(home)

    # accesses

    @contextlib.contextmanager
    def making(self, maker: str | None) -> Iterator[None]:
        """Lets ``maker`` make the tensors of this context, unless it is None."""
        before, self._maker = self._maker, maker or self._maker
        try:
            yield
        finally:
            self._maker = before

    def torch_ran(self, func: Any, reads: Sequence[Any], writes: Sequence[Any], results: Sequence[Any]) -> None:
        """Notes an operation of torch on the current stream; its new tensors may get memory that went back."""
        stream, name = self.current.name, str(func)
        if results:
            self._take_back(stream)
        made = [result for result in results if self._memory_of(result) is None and result.numel()]
        for result in made:
            self._follow(result, name, self._maker or stream)
        self._do(stream, reads, writes, name)
        self._do(self._maker or stream, (), made, name)
        if "_local_scalar_dense" in name and self._memory_of(reads[0]) is not None:
            self.current.synchronize()

    def _do(self, stream: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], name: str) -> None:
        used, written = ([part for tensor in tensors for part in self._parts(tensor)] for tensors in (reads, writes))
        if used or written:
            self.clocks.do(stream, used, written, name)

    def _memory_of(self, tensor: torch.Tensor) -> _Memory | None:
        return self._memories.get(StorageWeakRef(tensor.untyped_storage()).cdata)

    def _follow(self, tensor: torch.Tensor, made_by: str, stream: str) -> None:
        storage = tensor.untyped_storage()
        name = f"memory {next(self._numbers)}, made by {made_by} on {stream},"
        memory = _Memory(name, stream, StorageWeakRef(storage), storage.data_ptr(), [_Part(name, 0, storage.nbytes())])
        self._memories[memory.storage.cdata] = memory

    def _take_back(self, home: str) -> None:
        """Gives memory whose tensors are gone to the next ones of the stream that made it."""
        for key, memory in list(self._memories.items()):
            if memory.home == home and memory.storage.expired():
                del self._memories[key]
                for part in memory.parts if home != HOST else ():  # torch waits for copies from pinned memory itself
                    self.clocks.ends(home, part, "the next tensor gets", memory.recorded)

    def _parts(self, tensor: torch.Tensor) -> list[_Part]:
        memory = self._memory_of(tensor)
        if memory is None or not tensor.numel():
            return []
        width = tensor.element_size()
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        first = tensor.storage_offset() * width
        return memory.cut(self.clocks, first, first + (reach + 1) * width)

    def parts_at(self, address: int, nbytes: int) -> list[_Part]:
        """Returns the parts of the memory at ``address``; none of a memory that is not followed."""
        for memory in self._memories.values():
            first = address - memory.address
            if not memory.storage.expired() and 0 <= first < memory.parts[-1].end:
                return memory.cut(self.clocks, first, first + nbytes)
        return []

    def _launched(self, name: str, op: Callable[..., None], written: Callable[[Any], Sequence[Any]]) -> Any:
        def launch(*arguments: Any) -> None:
            *rest, stream = arguments
            if stream is not None and not isinstance(stream, int):  # without a stream, the current one
                rest, stream = list(arguments), None
            where = self.current if stream is None else self.streams[stream]
            writes = _tensors(written(rest))
            kept = {id(tensor) for tensor in writes}
            reads = [tensor for tensor in _tensors(rest) if id(tensor) not in kept]
            self._do(where.name, reads, writes, name)
            with _disable_current_modes():
                op(*rest)

        return launch

    def _moved(self, device: int) -> Callable[..., None]:
        def move(target: int, source: int, nbytes: int, stream: int) -> None:
            parts = self.parts_at((target, source)[device], nbytes)
            reads, writes = ((), parts) if device == 0 else (parts, ())
            self.clocks.do(self.streams[stream].name, reads, writes, "the copy engine")
            ctypes.memmove(target, source, nbytes)

        return move

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Lets the memory of ``tensor`` go back behind the work of ``stream``, too."""
        if (memory := self._memory_of(tensor)) is not None:
            memory.recorded.add(stream.name)


@contextlib.contextmanager
def ordered_card(monkeypatch: Any) -> Iterator[OrderedCard]:
    """Provides the card inside; tensors made there are watched, and checked once more at the end."""
    card = OrderedCard(monkeypatch)
    with _Pinned(card), _Watch(card):
        yield card
    card.check()


def _recorder(card: OrderedCard) -> Callable[..., None]:
    """Returns a method of tensors."""

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        card.record(tensor, stream)

    return record_stream


def _tensors(value: Any) -> list[torch.Tensor]:
    """Lists the tensors of an argument, also those in lists, named tuples and tables."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    if isinstance(value, PageTable):
        return [*_tensors(value.table), value.page_bytes, value.chunks]
    if isinstance(value, BufferTable):
        return [value.offsets, value.sizes, *value.buffers]
    return []

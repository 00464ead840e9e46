"""Names the errors of this package; each message says which setting to change.

A refusal loses nothing and leaves the device untouched.
"""


class HostCopyError(Exception):
    """Base of all errors of this package except ``MustStop``."""


class MustStop(Exception):
    """Caches no longer agree: no fallback may catch it, and the server must not go on."""


class SettingError(HostCopyError, ValueError):
    """A setting has an unusable value; the message names it."""


class GeometryError(HostCopyError, ValueError):
    """Sizes do not fit together: a page smaller than a ratio, a ring that is no multiple of it, ..."""


class LayoutRefused(HostCopyError, NotImplementedError):
    """This pool's layout is not on the allow-list; the engine keeps its own behaviour."""


class IndexMismatch(HostCopyError, ValueError):
    """Indices do not describe the request: wrong length, a slot out of range or off its page."""


class WindowNotMapped(HostCopyError):
    """A position the next step reads has no SWA slot, so the request cannot be copied (or restored) exactly."""


class HostMemoryExhausted(HostCopyError, MemoryError):
    """The host arena has no room; the message names the setting to raise."""


class RowsNotKept(HostCopyError):
    """A HiSparse request's rows cannot be detached: they are being staged, or freed; the engine recomputes."""


class ArenaNotShared(HostCopyError):
    """The ranks of a group cannot share an arena; all ranks raise it, and each has one of its own."""


class AnotherRank(HostCopyError):
    """Another rank could not save or load the request; no rank keeps or loads its copy."""


class RankNotHeard(MustStop, TimeoutError):
    """Another rank that shares the arena did not take a turn in time."""


class CopyMismatch(HostCopyError, ValueError):
    """A copy does not belong here: another pool's geometry, another length."""


class CopyConsumed(HostCopyError):
    """A copy was used after it was loaded or released."""


class StaleWeights(HostCopyError):
    """The weights changed between save and load; the engine has to recompute."""


class CopyEngineError(HostCopyError, RuntimeError):
    """The CUDA driver refused to enqueue a copy; the request has none."""


class VerifyMismatch(MustStop, AssertionError):
    """DSV4_VERIFY found a byte that differs; the message has family, layer, position and byte."""


class HooksNotLanded(HostCopyError, RuntimeError):
    """A hook is missing from the running engine; the server must not start."""

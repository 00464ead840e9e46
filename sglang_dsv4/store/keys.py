"""Names the objects of a store by the tokens, the model and the layout of their bytes.

    root  = H("dsv4-store-1", identity, tenant)       never the number of ranks: their cache is the same
    k[i]  = H(k[i-1], the token ids of page i)        with drafts one id more, as in the trie
    object name: hex(k[i]) + "p" a page | + "w0", "w1" ... the units of the window before the end of page i

H is SHA-256; with a secret it is keyed BLAKE3, so that nobody without it can name or seal an object.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from sglang_dsv4.sessions.trie import Page, Trie
from sglang_dsv4.store.wire import PAGE

VERSION = b"dsv4-store-1"
SECRET_CONTEXT = "sglang_dsv4 store 2026 key"  # of BLAKE3's key derivation


def hasher(secret: bytes | None) -> Any:
    """Returns an empty hash of 32 bytes; copy it before each use."""
    if secret is None:
        return hashlib.sha256()
    import blake3  # noqa: PLC0415 - only a store with a secret needs it

    return blake3.blake3(key=blake3.blake3(secret, derive_key_context=SECRET_CONTEXT).digest())


def digest(empty: Any, *parts: bytes) -> bytes:
    """Returns the hash of ``parts``. empty: see ``hasher``."""
    one = empty.copy()
    for part in parts:
        one.update(part)
    found: bytes = one.digest()
    return found


def marked(part: Hashable) -> bytes:
    """Encodes one part of a namespace, so that no two namespaces are alike; None is not ""."""
    if part is None:
        return b"\0"
    if isinstance(part, bytes):  # the hash of a long key, which no key is
        return b"\2" + len(part).to_bytes(8, "little") + part
    raw = str(part).encode(errors="surrogatepass")  # a client's key may hold half a surrogate pair
    return b"\1" + len(raw).to_bytes(8, "little") + raw


def root(empty: Any, identity: bytes, namespace: Iterable[Hashable]) -> bytes:
    """Returns the key before the first page of a namespace. identity: see ``identity``."""
    parts = (marked(part) for part in namespace)
    return digest(empty, VERSION, len(identity).to_bytes(8, "little"), identity, *parts)


def chain(empty: Any, before: bytes, pages: Iterable[Any]) -> list[bytes]:
    """Returns the key of each page. before: the key before the first. pages: the token ids of each, int64, as bytes."""
    found = []
    for ids in pages:
        before = digest(empty, before, ids)
        found.append(before)
    return found


def object_name(key: bytes, part: int) -> str:
    """Returns the name of the object with ``part`` of the page of ``key``."""
    return key.hex() + ("p" if part == PAGE else f"w{part - 1}")


@dataclass(eq=False)
class Behind:
    """Names the tokens behind the first ``end`` tokens of a prompt: a namespace of a trie without their pages.

    tokens: of the prompt. hashed: how many of them the ``key`` is of.
    """

    namespace: tuple[Hashable, ...]
    tokens: Any
    end: int
    hashed: int = 0
    key: bytes | None = None


class Keys:
    """Remembers the keys of the pages of a trie that were written. The scheduler thread owns it."""

    def __init__(self, trie: Trie, identity: bytes, secret: bytes | None) -> None:
        """Starts with none. identity: of the model and the layout."""
        self._trie, self._identity, self._empty = trie, identity, hasher(secret)
        self._of: dict[Page, bytes] = {}

    def root(self, namespace: Any) -> bytes:
        """Returns the key before the first page of a namespace."""
        if isinstance(namespace, Behind):
            return self.hash_ahead(namespace, namespace.end)
        return root(self._empty, self._identity, namespace)

    def hash_ahead(self, behind: Behind, tokens: int) -> bytes:
        """Returns the key of ``behind`` as far as it is known, once up to so many more tokens were hashed."""
        key = self.root(behind.namespace) if behind.key is None else behind.key
        end = min(behind.end, behind.hashed + tokens)
        behind.key = [key, *chain(self._empty, key, self._trie.keys(behind.tokens, end, behind.hashed))][-1]
        behind.hashed = end
        return behind.key

    def of(self, page: Page) -> bytes:
        """Returns the key of ``page``; hashes it, and those before it, where they are not known."""
        way, at = [], page
        while at not in self._of:
            way.append(at)
            before = self._trie.before(at)
            if before is None:
                break
            at = before
        key = self._of[at] if at in self._of else self.root(self._trie.namespace(at))
        for at in reversed(way):
            key = self._of[at] = digest(self._empty, key, self._trie.key(at))
        return key

    def forget(self, pages: Iterable[Page]) -> None:
        """Forgets pages that went."""
        for page in pages if self._of else ():
            self._of.pop(page, None)

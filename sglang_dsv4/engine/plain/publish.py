"""Keeps slots that were not restored out of the prefix cache: another request would match and read them.

A copy holds the window behind n, so of the SWA page where that window begins only the last rows were loaded, and of the
compression state only the part n needs. The tree would publish that page after an extend of one token. So the request
stays out of the tree until it is released. Then that page's SWA is freed first, unless the request's own window has
moved past it, or its end is n itself, as in the copy. Pages behind it were computed whole.

    n % 256 in 1..126:  | ... half-loaded page | n ...      freed: a match ends before it, or at a later page
    n % 256 in 127..255:            | page with the whole window, n ...
    n % 256 == 0:                   | half-loaded page |n   a match at n reads only loaded rows

These are for a window of 128 tokens. DSpark's draft reads a row more, so there 127 belongs to the first line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dsv4.cache.families import Geometry, window_start
from sglang_dsv4.engine.plain.serving import PlainServing, plain_of
from sglang_dsv4.engine.plain.sessions import end_prompt, keep_finished, tell_node
from sglang_dsv4.engine.releases import engine_release
from sglang_dsv4.engine.state import request_state

Original = Callable[..., Any]


def keep_from_tree(req: Any, tokens: int) -> None:
    """Keeps a request restored with ``tokens`` tokens from publishing while it runs."""
    if not req.skip_radix_cache_insert:  # the engine itself keeps some requests from the tree for good
        request_state(req).restored = tokens
        req.skip_radix_cache_insert = True


def release_kv_cache(original: Original, req: Any, tree_cache: Any, *, checkpoint: bool) -> Any:
    """Runs AROUND mem_cache.common.release_kv_cache.

    At a finish the request may publish, and its session is kept; a retract only ends its mark.
    """
    plain = plain_of(tree_cache.token_to_kv_pool_allocator)
    tokens, request_state(req).restored = request_state(req).restored, None
    if tokens is not None:
        req.skip_radix_cache_insert = False
        if plain is not None and checkpoint:
            _repair(plain, req, tree_cache, tokens)
    if plain is not None and plain.sessions is not None and checkpoint and req.kv.holds_kv:
        keep_finished(plain, req, tree_cache)
    if plain is not None and plain.sessions is not None:
        end_prompt(plain.sessions, req)
    result = original(req, tree_cache, checkpoint=checkpoint)
    if plain is not None and plain.sessions is not None:
        tell_node(plain.sessions, req)
    return result


def _repair(plain: PlainServing, req: Any, tree: Any, tokens: int) -> None:
    release, geometry = engine_release(), plain.host.buffers.geometry
    half = half_loaded_page(geometry, tokens)
    if half is not None and release.cursor(req) <= half:
        release.free_swa_page(tree, req, half)
    # A leaf without any SWA could not be matched, and the engine never makes one.
    page, keys = geometry.page_size, int(req.owned_kv_len()) - is_bigram(tree)
    req.skip_radix_cache_insert = keys // page * page <= release.cursor(req)


def is_bigram(tree: Any) -> bool:
    """Returns whether the tree's key of a position is its token and the next, as a draft's row depends on both.

    The last token then has no key yet.
    """
    core = getattr(tree, "tree_core", None)  # a cache without a tree has none
    return core is not None and bool(core.is_eagle)


def half_loaded_page(geometry: Geometry, tokens: int) -> int | None:
    """Returns the first position of the page that a restore of ``tokens`` tokens leaves unfit to be matched, if any."""
    page = geometry.page_size
    start = window_start(geometry, tokens) // page * page
    return start if start + page < tokens else None

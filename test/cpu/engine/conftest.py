"""Pages are handed out in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _plain_pages() -> Iterator[None]:
    from plain_world import naive_pages  # when the engine can be imported

    with naive_pages():
        yield

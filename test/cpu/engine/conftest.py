"""Settings of the surrounding shell do not reach a server under test; pages are handed out in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _default_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("ENABLED", "HOST_GB", "HOST_COPIES", "TRANSFER", "PLAIN", "LAYOUT", "VERIFY"):
        monkeypatch.delenv(f"DSV4_{name}", raising=False)
    from plain_world import naive_pages  # when the engine can be imported

    with naive_pages():
        yield

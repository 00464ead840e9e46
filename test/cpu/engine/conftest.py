"""Settings of the surrounding shell do not reach a server under test."""

import pytest


@pytest.fixture(autouse=True)
def _default_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENABLED", "HOST_GB", "HOST_COPIES", "TRANSFER", "PLAIN", "LAYOUT", "VERIFY"):
        monkeypatch.delenv(f"DSV4_{name}", raising=False)

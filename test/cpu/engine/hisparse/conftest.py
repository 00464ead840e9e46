"""Coordinators run on CPU here."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _coordinators_on_cpu() -> Iterator[None]:
    from hisparse_world import on_cpu

    with on_cpu():
        yield

"""Runs the store's process on a machine without torchvision's operators, for the demo and tests."""

from __future__ import annotations

from sglang_dsv4.store.worker import main
from sglang_dsv4.testing.standalone import _define_torchvision_ops

if __name__ == "__main__":
    try:
        import torchvision  # noqa: F401 - where it works its own operators are there
    except (ImportError, RuntimeError):
        _define_torchvision_ops()
    main()

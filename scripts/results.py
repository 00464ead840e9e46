"""Results are files: where those of this checkout lie, and what writes them."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # behind everything else: for a checkout that is not installed

from sglang_dsv4.bench.results import bound, headline, machine, page, status, write  # noqa: E402

FOLDER = ROOT / "docs" / "results"

__all__ = ["FOLDER", "bound", "headline", "machine", "page", "status", "write"]

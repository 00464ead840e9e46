#!/usr/bin/env python3
"""``sglang-dsv4 drill clients`` from a checkout that is not installed.   python3 scripts/drill_retract.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from sglang_dsv4.command_line import to_its_end
from sglang_dsv4.livetest import clients

if __name__ == "__main__":
    sys.exit(to_its_end("drill_retract.py", lambda: clients.main(sys.argv[1:])))

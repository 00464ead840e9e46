"""For a checkout that is not installed: the package is found behind everything else."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

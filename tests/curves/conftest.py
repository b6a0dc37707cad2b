"""`bench` is no part of the package: its folder is made importable behind everything that is installed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent.parent))

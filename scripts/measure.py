"""Measure every row of a topic afresh, and say which are met.

python scripts/measure.py house [--row H4] [--json out/house.json]
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # in place, installed or not
    from scripts.measurements.main import main

    sys.exit(main())

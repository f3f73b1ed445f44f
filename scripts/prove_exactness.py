"""Prove, step by step and over whole runs, that --megascale computes what stock Megatron-Core computes.

python scripts/prove_exactness.py --layout single,ep2 [--json out/exactness.json]
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # in place, installed or not
    from scripts.exactness.main import main

    sys.exit(main())

"""Train the same MoE with stock Megatron-Core and with --megascale, and compare speed, memory, traffic and losses.

python scripts/compare_with_stock.py --preset coarse --json out/coarse.json [--ranks 2] [-- --trainer-flag ...]
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # in place, installed or not
    from scripts.comparison.main import main

    sys.exit(main())

"""CMSA beside other ways to clip, on a small image-to-text model. See `scripts/cmsa_demo/main.py`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # in place, installed or not
    from scripts.cmsa_demo.main import main

    sys.exit(main())

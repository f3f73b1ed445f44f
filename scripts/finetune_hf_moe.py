"""Fine-tunes a Hugging Face MoE model with DeepSpeed, experts in pages or not.

python scripts/finetune_hf_moe.py --deepspeed configs/deepspeed/zero2.json [--family qwen3_moe] [--compare]
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # in place, installed or not
    from scripts.deepspeed_runs.main import main

    sys.exit(main())

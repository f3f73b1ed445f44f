"""Train a GPT mixture-of-experts model on megatron-core, on text, with Megatron-LM's flags.

python scripts/pretrain_moe.py --yaml-cfg configs/quickstart.yaml --data-path out/corpus.txt
torchrun --nproc_per_node 2 scripts/pretrain_moe.py ... --expert-model-parallel-size 2 [--megascale]
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # in place, installed or not
    from scripts.moe_trainer.main import main

    sys.exit(main())

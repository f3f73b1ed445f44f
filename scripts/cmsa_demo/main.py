"""Six ways to clip, on a model whose image gradients are 10,000 times its text gradients.

    python scripts/demonstrate_cmsa.py --output out/cmsa

Trains the same small captioner of handwritten digits from several seeds with each way, prints a table (medians over
seeds), and writes `cmsa.json` and `cmsa.png`. Batches and initial weights of a seed are the same for all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from scripts.cmsa_demo.clippers import METHODS
from scripts.cmsa_demo.data import load
from scripts.cmsa_demo.train import Run, medians, train
from scripts.measuring.environment import measured_environment
from scripts.measuring.files import write_json
from scripts.measuring.progress import say


def compare(*, seeds: int, steps: int) -> list[Run]:
    """All methods from all seeds, one after the other."""
    digits = load()
    runs = []
    for seed in range(seeds):
        for method in METHODS:
            runs.append(train(digits, method=method, seed=seed, steps=steps))
            say(f"seed {seed}, {method}: loss {runs[-1].final_loss:.4f}")
    return runs


def table(runs: Sequence[Run]) -> str:
    """Medians over seeds, as Markdown."""
    lines = ["| clipping | final loss | loss oscillation | spread of log10 norms |", "|---|---|---|---|"]
    for method in METHODS:
        m = medians(runs, method)
        lines.append(f"| {method} | {m['final_loss']:.4f} | {m['oscillation']:.4f} | {m['spread']:.2f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("out/cmsa"), metavar="DIR", help="default: out/cmsa")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="how many (default 5)")
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="of each run (default 400)")
    args = parser.parse_args(argv)
    if args.seeds < 1 or args.steps < 45:
        parser.error(f"--seeds {args.seeds} --steps {args.steps}: give at least 1 seed and 45 steps")
    torch.use_deterministic_algorithms(True)
    runs = compare(seeds=args.seeds, steps=args.steps)
    print(table(runs))
    from scripts.cmsa_demo.picture import draw

    content = {
        "environment": measured_environment(),
        "methods": {method: medians(runs, method) for method in METHODS},
        "runs": [{"method": r.method, "seed": r.seed, "losses": r.losses, "norms": r.after} for r in runs],
    }
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / "cmsa.json", content)
    draw(runs, args.output / "cmsa.png")
    print(f"written: {args.output / 'cmsa.json'}, {args.output / 'cmsa.png'}")
    return 0

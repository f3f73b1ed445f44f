"""What a save beside training costs training, by the clock on the wall.

    python -m scripts.measurements.checkpoint_stall TEXT FOLDER [flags of the run, as --megascale-checkpoint-cpus 1]

Windows of steps with a save at their beginning and windows without one take turns in one run. A window's seconds are
all seconds from its beginning to its end: the call that begins the save, the steps during which it is written, and the
calls between steps that make it count.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

from scripts.measuring.processes import ROOT

_STEPS = 5
"""Of a window: more than a save takes."""
_WINDOWS = 15
"""With a save; there is one more without."""
_FLAGS = (
    "--train-iters 1000 --megascale --megascale-checkpoint-format paged --megascale-checkpoint-beside on "
    "--megascale-checkpoint-keep 2"
)


def stall(data_path: Path, folder: Path) -> dict[str, float]:
    """Runs the measurement in a process of its own; ``steps`` is a save's price in steps, the rest explains it."""
    command = [sys.executable, "-m", "scripts.measurements.checkpoint_stall", str(data_path), str(folder)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _measure(data_path: str, folder: str, *more: str) -> dict[str, float]:
    from scripts.moe_trainer.arguments import parse_args
    from scripts.moe_trainer.trainer import Trainer

    flags = f"--yaml-cfg {ROOT / 'configs/quickstart.yaml'} --data-path {data_path} --save {folder} {_FLAGS}"
    with Trainer(parse_args([*flags.split(), *more])) as trainer:

        def window(*, saves: bool) -> tuple[float, float]:
            """Seconds of a window, and of the call that begins the save."""
            start = time.perf_counter()
            if saves:
                trainer.save()
            called = time.perf_counter() - start
            for _ in range(_STEPS):
                trainer.train_step()
            return time.perf_counter() - start, called

        window(saves=False)
        window(saves=True)  # the first one makes what later ones reuse
        trainer.finish_saves()
        without, with_save, calls = [window(saves=False)[0]], [], []
        for _ in range(_WINDOWS):
            seconds, called = window(saves=True)
            trainer.finish_saves()
            with_save.append(seconds)
            calls.append(called)
            without.append(window(saves=False)[0])
    step = statistics.median(without) / _STEPS
    around = [(before + after) / 2 for before, after in pairwise(without)]
    prices = [seconds - usual for seconds, usual in zip(with_save, around, strict=True)]
    return {
        "steps": statistics.median(prices) / step,
        "step_seconds": step,
        "call_steps": statistics.median(calls) / step,
        "spread_steps": statistics.stdev(prices) / step / len(prices) ** 0.5,
    }


if __name__ == "__main__":
    print(json.dumps(_measure(*sys.argv[1:])))

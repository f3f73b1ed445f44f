"""Ranks killed with SIGKILL at random moments, and how the run comes back.

    python -m scripts.measurements.checkpoint_kills TEXT 10     makes ten more runs

What is found out is added to a file, a line a run; a measurement makes a few more and counts all of them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from scripts.measuring.processes import ROOT
from scripts.measuring.progress import say

RUNS = 50
RESULTS = ROOT / "out" / "checkpoint_kills.jsonl"
"""What earlier calls found out: fifty runs take longer than one likes to wait at once."""
SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --num-experts 4 --seq-length 16 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 60 --lr 3e-3 --lr-warmup-iters 2 --split 100 "
    "--moe-router-topk 2 --save-interval 3"
)
_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Killed:
    """One run: what was killed when, whether it ended well with the losses of the run that was left alone."""

    ranks: int
    seed: int
    after_seconds: float
    rank: int
    struck: bool
    ended: bool
    equal: bool
    seconds_to_next_step: float | None


def flags_of(model: str, ranks: int, data_path: Path, folder: Path) -> list[str]:
    """The trainer's flags for a run that saves beside training and begins where it stands."""
    layout = f"--expert-model-parallel-size {2 if ranks > 1 else 1}"
    paged = "--megascale --megascale-checkpoint-format paged --megascale-checkpoint-beside on --log-interval 1"
    words = [*model.split(), *layout.split(), *paged.split(), "--data-path", str(data_path)]
    return [*words, "--save", str(folder), "--load", str(folder), "--metrics-jsonl", f"{folder}.jsonl"]


def losses(path: Path) -> dict[int, set[float]]:
    """All losses that each step ever had."""
    found: dict[int, set[float]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        if record["event"] == "step":
            found.setdefault(record["iteration"], set()).add(record["loss"])
    return found


def run(flags: list[str], ranks: int, *, kill: tuple[float, int] | None = None) -> tuple[bool, bool, float | None]:
    """Trains; kills rank ``kill[1]`` after ``kill[0]`` seconds. (ended well, the kill struck, seconds to a step)."""
    launcher = ["--standalone", "--local-addr", "127.0.0.1", "--nproc_per_node", str(ranks), "--max-restarts", "2"]
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, str(ROOT / "scripts/pretrain_moe.py"), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    struck: list[float] = []
    timers = [threading.Timer(_TIMEOUT_SECONDS, process.kill)]
    if kill is not None:
        timers.append(threading.Timer(kill[0], _kill, (process.pid, kill[1], struck)))
    for timer in timers:
        timer.start()
    first_step: float | None = None
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if struck and first_step is None and line.startswith("iteration "):
                first_step = time.monotonic() - struck[0]
        ended = process.wait() == 0
    finally:
        for timer in timers:
            timer.cancel()
        process.kill()
    return ended, bool(struck), first_step


def _kill(launcher: int, rank: int, struck: list[float]) -> None:
    try:
        ranks = [p for p in psutil.Process(launcher).children() if "pretrain_moe" in " ".join(p.cmdline())]
        if rank < len(ranks):
            ranks[rank].send_signal(signal.SIGKILL)
            struck.append(time.monotonic())
    except psutil.NoSuchProcess:
        return  # it ended before


def killed_runs(data_path: Path, *, more: int = 2) -> list[Killed]:
    """Runs so far in which a rank was killed, ``more`` of all runs new as long as these are fewer than ``RUNS``.

    In turn on 2 and on 4 ranks. A run that ended before its kill is written down, and counts for nothing.
    """
    RESULTS.parent.mkdir(exist_ok=True)
    done = [Killed(**json.loads(line)) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    references: dict[int, tuple[dict[int, set[float]], float]] = {}
    with tempfile.TemporaryDirectory(prefix="megascale-kills-") as folder:
        for seed in range(len(done), len(done) + more):
            if sum(run.struck for run in done) >= RUNS:
                break
            ranks = 2 if seed % 2 == 0 else 4
            if ranks not in references:
                alone, start = Path(folder) / f"alone-{ranks}", time.monotonic()
                ended, _, _ = run(flags_of(SMALL, ranks, data_path, alone), ranks)
                if not ended:
                    raise RuntimeError(f"the run on {ranks} ranks that nobody kills does not end well")
                references[ranks] = losses(Path(f"{alone}.jsonl")), time.monotonic() - start
            expected, seconds = references[ranks]
            chance = random.Random(seed)
            after, rank = chance.uniform(1.0, seconds), chance.randrange(ranks)
            here = Path(folder) / f"run-{seed}"
            ended, struck, next_step = run(flags_of(SMALL, ranks, data_path, here), ranks, kill=(after, rank))
            equal = losses(Path(f"{here}.jsonl")) == expected
            done.append(Killed(ranks, seed, after, rank, struck, ended, equal, next_step))
            say(f"    {done[-1]}")
            with RESULTS.open("a") as file:
                file.write(json.dumps(asdict(done[-1])) + "\n")
    return [run for run in done if run.struck]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m scripts.measurements.checkpoint_kills TEXT RUNS")
    found = killed_runs(Path(sys.argv[1]), more=int(sys.argv[2]))
    say(f"{sum(run.ended and run.equal for run in found)} of {len(found)} came back with equal losses")

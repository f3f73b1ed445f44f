"""Runs the proof of a layout in processes of its own and judges it."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.exactness.deviations import FreeStep, MutatedStep, ProvedStep
from scripts.exactness.layouts import MEGASCALE_FLAGS, Layout
from scripts.exactness.verdict import Verdict, judge_free, judge_mutant, judge_steps
from scripts.measuring.processes import Workers
from scripts.measuring.progress import Progress

TARGET = "scripts.exactness.proof:Proof"
PARTS = ("steps", "mutant", "free")
MUTANT_STEPS = 3
_CHUNK = 10
_STEP_TIMEOUT_SECONDS = 60.0
_OPEN_TIMEOUT_SECONDS = 120.0


def prove(
    layout: Layout,
    *,
    data_path: Path,
    steps: int = 100,
    parts: Sequence[str] = PARTS,
    megascale: bool = True,
    megascale_flags: Sequence[str] = MEGASCALE_FLAGS,
) -> Verdict:
    """Prove one layout: `steps` compared steps, the mutant, and a free run of `steps` steps, as `parts` asks.

    `megascale_flags` are given to MegaScale's side only; `megascale` False leaves stock and its control: what the proof
    itself does to two stocks.

    Raises:
        ValueError: an unknown part, no steps.
        WorkersFailed: a rank raised, died or was silent.
    """
    unknown = sorted(set(parts) - set(PARTS))
    if unknown or not parts or steps < 1:
        raise ValueError(f"parts {','.join(parts)!r} of {steps} steps: choose of {', '.join(PARTS)}, at least 1 step")
    start = time.monotonic()
    arguments = {
        "flags": layout.flags(data_path=data_path.resolve(), steps=steps + MUTANT_STEPS),
        "megascale_flags": list(megascale_flags),
        "megascale": megascale,
    }
    total = steps * sum(part in parts for part in ("steps", "free"))
    with (
        Workers(TARGET, ranks=layout.ranks, threads=1, name=layout.name, arguments=arguments) as workers,
        Progress(f"{layout.name}: {layout.what}", total) as progress,
    ):
        verdict: dict[str, Any] = {}
        if "steps" in parts or "mutant" in parts:
            verdict["initial_differences"] = _open(workers)
        if "steps" in parts:
            proved: list[list[ProvedStep]] = _run(workers, "prove", steps, progress)
            verdict.update(judge_steps(proved))
        if "mutant" in parts and megascale and not layout.is_bf16:  # bf16 rounds by more than a mutant's 0.1 %
            mutated: list[list[MutatedStep]] = _run(workers, "mutate", MUTANT_STEPS)
            verdict["mutant"] = judge_mutant(mutated)
        if "free" in parts:
            differences = _open(workers)
            free: list[list[FreeStep]] = _run(workers, "run_free", steps, progress)
            verdict["free"] = judge_free(free[0], differences)
    return Verdict(layout=layout, steps=steps, seconds=time.monotonic() - start, **verdict)


def _open(workers: Workers) -> list[str]:
    by_rank: list[list[str]] = workers.call("open", timeout_seconds=_OPEN_TIMEOUT_SECONDS)
    return [f"rank {rank}: {what}" for rank, found in enumerate(by_rank) for what in found]


def _run(workers: Workers, method: str, steps: int, progress: Progress | None = None) -> list[list[Any]]:
    """Steps by rank, asked for in chunks so that a reader sees how far they are."""
    made: list[list[Any]] = []
    while (done := len(made[0]) if made else 0) < steps:
        chunk = min(_CHUNK, steps - done)
        by_rank = workers.call(method, timeout_seconds=chunk * _STEP_TIMEOUT_SECONDS, steps=chunk)
        made = [*map(list.__add__, made, by_rank)] if made else by_rank
        if progress is not None:
            progress.advance(chunk, note=method)
    return made

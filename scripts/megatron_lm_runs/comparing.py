"""The same run with stock and with `--megascale`, and how far they are apart."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.megatron_lm_runs.combinations import BASE, Combination
from scripts.megatron_lm_runs.running import Run, RunFailed, run


@dataclass(frozen=True)
class Compared:
    """Both runs of a combination."""

    combination: Combination
    stock: Run
    megascale: Run

    @property
    def loss_difference(self) -> float:
        """Largest relative difference of losses."""
        return largest_difference(self.stock.losses, self.megascale.losses)

    @property
    def norm_difference(self) -> float:
        """Largest relative difference of gradient norms."""
        return largest_difference(self.stock.scalars["grad-norm"], self.megascale.scalars["grad-norm"])


def largest_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Largest relative difference of two series; infinite where one is shorter or empty."""
    if len(first) != len(second) or not first:
        return float("inf")
    return max(abs(a - b) / max(abs(a), 1e-30) for a, b in zip(first, second, strict=True))


def compare(megatron_lm: Path, combination: Combination, *, script: str = "pretrain_gpt.py") -> Compared:
    """Runs both.

    Raises:
        RunFailed: with the error of the run that failed.
    """
    flags = [*BASE, *combination.flags]
    with tempfile.TemporaryDirectory(prefix="megascale-pages-") as scratch:
        own = ["--megascale", *(word.format(scratch=scratch) for word in combination.megascale)]
        stock = run(megatron_lm / script, flags, ranks=combination.ranks)
        if stock.status:
            raise RunFailed(f"{combination.name}: stock does not run here: {stock.error}")
        megascale = run(megatron_lm / script, [*flags, *own], ranks=combination.ranks)
    if megascale.status:
        raise RunFailed(f"{combination.name}: --megascale failed: {megascale.error}")
    return Compared(combination, stock, megascale)

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
    control: Run | None = None
    """Stock with each expert computed in two halves, where it was asked for."""

    @property
    def loss_difference(self) -> float:
        """Largest relative difference of losses."""
        return largest_difference(self.stock.losses, self.megascale.losses)

    @property
    def control_difference(self) -> float | None:
        """The same of the control: what another order of sums does to this run."""
        return None if self.control is None else largest_difference(self.stock.losses, self.control.losses)

    @property
    def norm_difference(self) -> float:
        """Largest relative difference of gradient norms."""
        return largest_difference(self.stock.scalars["grad-norm"], self.megascale.scalars["grad-norm"])


def largest_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Largest relative difference of two series; infinite where one is shorter or empty."""
    if len(first) != len(second) or not first:
        return float("inf")
    return max(abs(a - b) / max(abs(a), 1e-30) for a, b in zip(first, second, strict=True))


def run_stock(megatron_lm: Path, combination: Combination, *, script: str = "pretrain_gpt.py") -> Run:
    """Stock's side, which combinations that differ in MegaScale's flags only have in common.

    Raises:
        RunFailed: with its error.
    """
    done = run(megatron_lm / script, [*BASE, *combination.flags], ranks=combination.ranks)
    if done.status:
        raise RunFailed(f"{combination.name}: stock does not run here: {done.error}")
    return done


def compare(
    megatron_lm: Path,
    combination: Combination,
    *,
    script: str = "pretrain_gpt.py",
    stock: Run | None = None,
    control: bool = False,
) -> Compared:
    """Runs both, or MegaScale's side only where stock's is given; the control too, if asked for.

    Raises:
        RunFailed: with the error of the run that failed.
    """
    flags, path = [*BASE, *combination.flags], megatron_lm / script
    stock = stock or run_stock(megatron_lm, combination, script=script)
    with tempfile.TemporaryDirectory(prefix="megascale-pages-") as scratch:
        own = ["--megascale", *(word.format(scratch=scratch) for word in combination.megascale)]
        megascale = run(path, [*flags, *own], ranks=combination.ranks)
    if megascale.status:
        raise RunFailed(f"{combination.name}: --megascale failed: {megascale.error}")
    halves = run(path, flags, ranks=combination.ranks, launcher="control") if control else None
    if halves is not None and halves.status:
        raise RunFailed(f"{combination.name}: the control failed: {halves.error}")
    return Compared(combination, stock, megascale, halves)

"""One run, and what is read off it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scripts.cmsa_demo.clippers import METHODS
from scripts.cmsa_demo.data import WORDS, Digits
from scripts.cmsa_demo.model import Captioner, module_norms

BATCH, LEARNING_RATE, WARMUP = 64, 3e-3, 20
RATIO = 1e4
"""Norm of the encoder's gradient over that of the decoder's, at the start."""
WINDOW = 21
"""Steps of the moving average that oscillation is measured against."""


@dataclass(frozen=True)
class Run:
    """Losses before each step, and norms of modules before and after clipping."""

    method: str
    seed: int
    losses: tuple[float, ...]
    before: tuple[dict[str, float], ...]
    after: tuple[dict[str, float], ...]

    @property
    def spread(self) -> float:
        """Mean over steps of the standard deviation over modules of log10 of the clipped norm."""
        return statistics.fmean(_log_spread(norms) for norms in self.after[WARMUP:])

    @property
    def oscillation(self) -> float:
        """Standard deviation of the loss around its moving average, after warm-up."""
        losses, half = self.losses[WARMUP:], WINDOW // 2
        around = [
            losses[i] - statistics.fmean(losses[i - half : i + half + 1]) for i in range(half, len(losses) - half)
        ]
        return statistics.pstdev(around)

    @property
    def final_loss(self) -> float:
        """Mean of the last 20 losses."""
        return statistics.fmean(self.losses[-20:])


def _log_spread(norms: dict[str, float]) -> float:
    return statistics.pstdev(math.log10(max(norm, 1e-30)) for norm in norms.values())


def train(digits: Digits, *, method: str, seed: int, steps: int) -> Run:
    """Trains from a seed, which also draws the batches: the same for every method."""
    torch.manual_seed(seed)
    model = Captioner(len(WORDS), digits.captions.shape[1])
    generator = torch.Generator().manual_seed(seed)
    model.gain = _gain(model, digits, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    clip = METHODS[method](model)
    losses, before, after = [], [], []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP)
        loss = model(*digits.batch(generator, BATCH))
        optimizer.zero_grad()
        loss.backward()
        losses.append(float(loss.detach()))
        before.append(module_norms(model))
        if clip(loss):
            optimizer.step()
        after.append(module_norms(model))
    return Run(method, seed, tuple(losses), tuple(before), tuple(after))


def _gain(model: Captioner, digits: Digits, seed: int) -> float:
    """What makes the encoder's gradient ``RATIO`` times the decoder's."""
    model(*digits.batch(torch.Generator().manual_seed(seed + 1), 256)).backward()
    norms = module_norms(model)
    model.zero_grad()
    return RATIO * norms["generator"] / norms["encoder"]


def medians(runs: Sequence[Run], method: str) -> dict[str, float]:
    """Over seeds."""
    own = [run for run in runs if run.method == method]
    return {
        "final_loss": statistics.median(run.final_loss for run in own),
        "oscillation": statistics.median(run.oscillation for run in own),
        "spread": statistics.median(run.spread for run in own),
        "ratio_at_start": statistics.median(run.before[0]["encoder"] / run.before[0]["generator"] for run in own),
    }

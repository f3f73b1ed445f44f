"""Thresholds and what follows from them, as pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megascale_omni.clipping.statistics import GradientStatistics

NORM_EPS = 1.0e-6
"""Added to a norm before a threshold is divided by it, as torch and Megatron-Core do."""


@dataclass(frozen=True)
class MpuClip:
    """What one module's gradient was, and what is done to it.

    ``threshold`` is None where there is none (clipping is off); ``coefficient`` is what the gradient is multiplied by:
    1 where it is left alone.
    """

    name: str
    norm: float
    gvc: float
    threshold: float | None
    coefficient: float
    elements: float
    largest: float


def threshold(*, base: float, alpha: float, gvc: float, gvc_max: float) -> float:
    """``base * (1 + alpha * min(gvc, gvc_max))``: the norm that a module's gradient is clipped to."""
    return base * (1.0 + alpha * min(gvc, gvc_max))


def clip(
    *,
    name: str,
    found: GradientStatistics,
    base: float,
    alpha: float | None,
    gvc_max: float,
    norm: float | None = None,
) -> MpuClip:
    """The decision about one module; ``alpha`` None is off. ``norm``: where it is known in the framework's own bits."""
    gvc = found.gvc()
    norm = found.norm if norm is None else norm
    limit, coefficient = None, 1.0
    if alpha is not None:
        limit = threshold(base=base, alpha=alpha, gvc=gvc, gvc_max=gvc_max)
        # As stock compares: a norm that is NaN clips nothing, one of zero neither.
        ratio = limit / (norm + NORM_EPS)
        coefficient = ratio if ratio < 1.0 else 1.0
    return MpuClip(name, norm, gvc, limit, coefficient, found.count, found.largest)


def total_norm(modules: Sequence[MpuClip]) -> float:
    """The norm of all modules together."""
    return math.sqrt(math.fsum(module.norm**2 for module in modules))

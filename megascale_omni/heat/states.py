"""Hot, warm, cold, frozen: pure functions over a frozen snapshot of what experts did.

[Note: heat]
Each expert has three numbers over the last window of steps: the work of its tokens (FLOP), uses of its pages, bytes
that its tokens travelled. Each is divided by the largest of its module, so that it lies in 0 to 1; the score is their
weighted sum. An expert is *hot* above the 90th percentile of its module's scores, *cold* below the 30th if it has also
been without a token for the cold period, *warm* otherwise. Where tokens are balanced, nobody goes without, and nothing
becomes cold. All of it is counted in tokens and steps, never in seconds, so that it is the same in every run.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from megascale_omni.config import HeatConfig


class Heat(enum.IntEnum):
    """What an expert is taken for."""

    FROZEN = 0  # cold, and its pages were sent away; the first token wakes it
    COLD = 1  # below the cold percentile and without tokens for the cold period
    WARM = 2
    HOT = 3  # above the hot percentile


@dataclass(frozen=True)
class Snapshot:
    """A module's experts: ``metrics`` [experts, 3] over the last window, ``idle_steps`` since the last token,
    ``states`` as they were, ``pending``: with a gradient that has not been applied.
    """

    metrics: np.ndarray
    idle_steps: np.ndarray
    states: np.ndarray
    pending: np.ndarray


def scores(metrics: np.ndarray, config: HeatConfig) -> np.ndarray:
    """``[experts]`` scores of ``[experts, 3]`` metrics (compute, memory, communication), see [Note: heat]."""
    most = metrics.max(axis=0, initial=0.0)
    weights = np.array([config.compute_weight, config.memory_weight, config.communication_weight])
    result: np.ndarray = (metrics / np.where(most > 0, most, 1.0)) @ weights
    return result


def classify(snapshot: Snapshot, config: HeatConfig) -> np.ndarray:
    """``[experts]`` new states (Heat). A frozen expert stays frozen unless it got a token since the last look."""
    score = scores(snapshot.metrics, config)
    states = np.full(len(score), Heat.WARM, dtype=np.int8)
    if not len(score):
        return states
    states[score > np.percentile(score, config.hot_percentile)] = Heat.HOT
    below = score < np.percentile(score, config.cold_percentile, method="higher")
    idle = snapshot.idle_steps >= config.cold_steps
    states[below & idle] = Heat.COLD
    # Where a third of the experts or more never get a token, the percentile itself is zero.
    states[(score <= 0) & idle] = Heat.COLD
    states[(snapshot.states == Heat.FROZEN) & (snapshot.idle_steps >= config.refresh_steps)] = Heat.FROZEN
    return states


def to_freeze(snapshot: Snapshot, states: np.ndarray, config: HeatConfig) -> np.ndarray:
    """Experts to send away now (ascending): cold, with nothing pending."""
    cold = (states == Heat.COLD) & ~snapshot.pending
    chosen: np.ndarray = np.nonzero(cold)[0] if config.freeze else np.zeros(0, dtype=np.int64)
    return chosen


def to_probe(states: np.ndarray, *, before: float, now: float, turn: int, share: float) -> np.ndarray:
    """Frozen experts to try out: ``share`` of them, in turns, when the cold threshold rises (``before`` to ``now``)."""
    frozen = np.nonzero(states == Heat.FROZEN)[0]
    if now <= before or not len(frozen) or not share:
        return frozen[:0]
    count = max(1, int(len(frozen) * share))
    return np.sort(np.roll(frozen, -turn * count)[:count])

"""Finding alpha: three steps off, three on trial, five with a fit, then fixed. Pure functions.

The fit is a ridge regression of the modules' norms on their coefficients of variation,

    minimise over alpha  sum over modules i, steps t of  w_i (|g_i,t| / base - 1 - alpha GVC_i,t)^2 + ridge alpha^2

with ``w_i`` = |correlation of module i's norm with the loss| over the window, held in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

OFF_STEPS, TRIAL_STEPS, FIT_STEPS = 3, 3, 5
CALIBRATION_STEPS = OFF_STEPS + TRIAL_STEPS + FIT_STEPS
TRIAL_ALPHA = 0.1


class Stage(StrEnum):
    """Where a calibration stands."""

    OFF = "off"  # norms are recorded, nothing is clipped
    TRIAL = "trial"  # thresholds with TRIAL_ALPHA
    FITTING = "fitting"  # alpha is fitted to what was recorded, at each step anew
    FIXED = "fixed"


@dataclass(frozen=True)
class Observation:
    """One step: by module, norm of the gradient (before clipping), coefficient of variation, loss.

    A module without gradient has a norm of 0; a loss that nobody reported is NaN.
    """

    norms: tuple[float, ...]
    gvcs: tuple[float, ...]
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Fit:
    """A fitted alpha. ``unclamped``: before it was held in [0, 1]; ``standard_error``: NaN below two terms."""

    alpha: float
    unclamped: float
    standard_error: float
    weights: tuple[float, ...]
    terms: int

    @property
    def clamped(self) -> bool:
        """Whether the regression asked for an alpha outside of [0, 1]."""
        return self.alpha != self.unclamped


@dataclass(frozen=True)
class Calibration:
    """Where alpha comes from. ``held``: the alpha in force while it is fitted anew; None at the start of a run."""

    step: int = 0
    alpha: float | None = None
    held: float | None = None
    fit: Fit | None = None
    window: tuple[Observation, ...] = ()

    @property
    def stage(self) -> Stage:
        """The stage that the next step belongs to."""
        if self.step < OFF_STEPS:
            return Stage.OFF
        if self.step < OFF_STEPS + TRIAL_STEPS:
            return Stage.TRIAL
        return Stage.FITTING if self.step < CALIBRATION_STEPS else Stage.FIXED


def fixed(alpha: float) -> Calibration:
    """A given alpha, from the first step on."""
    return Calibration(step=CALIBRATION_STEPS, alpha=alpha)


def restarted(calibration: Calibration) -> Calibration:
    """Begins anew. An alpha that is in force stays in force until there is a new one: training is under way."""
    return Calibration(held=calibration.alpha, alpha=calibration.alpha)


def observe(
    calibration: Calibration, seen: Observation, *, base: float, ridge: float
) -> tuple[Calibration, float | None]:
    """One more step was seen: what is known after it, and the alpha that clips this very step (None: off)."""
    stage, step = calibration.stage, calibration.step + 1
    if stage is Stage.FIXED:
        return replace(calibration, step=step), calibration.alpha
    window = (*calibration.window, seen)
    if stage is Stage.FITTING:
        fit = fit_alpha(window, base=base, ridge=ridge)
        done = step == CALIBRATION_STEPS
        known = replace(calibration, step=step, alpha=fit.alpha, fit=fit, window=() if done else window)
        return known, fit.alpha
    alpha = calibration.held
    if alpha is None and stage is Stage.TRIAL:
        alpha = TRIAL_ALPHA
    return replace(calibration, step=step, alpha=alpha, window=window), alpha


def fit_alpha(window: Sequence[Observation], *, base: float, ridge: float) -> Fit:
    """The ridge regression of the module's docstring over all observed norms above 0.

    The standard error is that of a weighted regression, ``sqrt(s^2 sum w x^2) / (sum w x^2 + ridge)`` with ``s^2 =
    sum w r^2 / (terms - 1)``. Where no loss was reported all weights are 1.
    """
    weights = correlation_weights(window)
    terms = [
        (weights[i], seen.gvcs[i], seen.norms[i] / base - 1.0)
        for seen in window
        for i in range(len(weights))
        if seen.norms[i] > 0 and weights[i] > 0
    ]
    xx = math.fsum(w * x * x for w, x, _ in terms)
    xy = math.fsum(w * x * y for w, x, y in terms)
    alpha = xy / (xx + ridge) if xx + ridge > 0 else 0.0
    error = math.nan
    if len(terms) > 1 and xx + ridge > 0:
        variance = math.fsum(w * (y - alpha * x) ** 2 for w, x, y in terms) / (len(terms) - 1)
        error = math.sqrt(variance * xx) / (xx + ridge)
    return Fit(min(max(alpha, 0.0), 1.0), alpha, error, tuple(weights), len(terms))


def correlation_weights(window: Sequence[Observation]) -> list[float]:
    """By module, |correlation of norm and loss|; 1 where nobody reported a loss; 0 where either is constant."""
    modules = len(window[0].norms) if window else 0
    return [_weight([s.norms[i] for s in window], [s.losses[i] for s in window]) for i in range(modules)]


def _weight(norms: Sequence[float], losses: Sequence[float]) -> float:
    pairs = [(n, loss) for n, loss in zip(norms, losses, strict=True) if math.isfinite(loss)]
    if not pairs:
        return 1.0
    mean_n = math.fsum(n for n, _ in pairs) / len(pairs)
    mean_l = math.fsum(loss for _, loss in pairs) / len(pairs)
    above = math.fsum((n - mean_n) * (loss - mean_l) for n, loss in pairs)
    below = math.fsum((n - mean_n) ** 2 for n, _ in pairs) * math.fsum((loss - mean_l) ** 2 for _, loss in pairs)
    return min(1.0, abs(above) / math.sqrt(below)) if below > 0 else 0.0


def as_plain(calibration: Calibration) -> dict[str, Any]:
    """Plain values, for a checkpoint."""
    return asdict(calibration)


def from_plain(values: Mapping[str, Any]) -> Calibration:
    """What :func:`as_plain` wrote."""
    fit = values["fit"]
    return Calibration(
        step=int(values["step"]),
        alpha=values["alpha"],
        held=values["held"],
        fit=None if fit is None else Fit(**{**fit, "weights": tuple(fit["weights"])}),
        window=tuple(Observation(**{k: tuple(v) for k, v in seen.items()}) for seen in values["window"]),
    )

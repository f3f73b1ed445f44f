"""What one step of clipping was, for programs, log lines and files."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megascale_omni.clipping.calibration import Fit, Stage
from megascale_omni.clipping.policy import MpuClip


@dataclass(frozen=True)
class ClipReport:
    """The same on every rank.

    Attributes:
        norm: of the whole gradient, before clipping.
        alpha: in force at this step; None while clipping is off.
        stage: of the calibration.
        modules: a module each.
        skip: whether the step must be left out, because gradients are not finite; ``non_finite`` says where.
        skipped_steps: so many were left out up to now, this one included.
    """

    norm: float
    alpha: float | None
    stage: Stage
    modules: tuple[MpuClip, ...]
    skip: bool = False
    non_finite: str | None = None
    skipped_steps: int = 0

    def module(self, name: str) -> MpuClip:
        """A module by name. Raises KeyError where there is none."""
        for module in self.modules:
            if module.name == name:
                return module
        raise KeyError(name)

    def as_record(self) -> dict[str, object]:
        """Plain values for a JSON line."""
        return {
            "alpha": self.alpha,
            "stage": str(self.stage),
            "skipped_steps": self.skipped_steps,
            "non_finite": self.non_finite,
            "mpus": {
                module.name: {
                    "norm": module.norm,
                    "gvc": module.gvc,
                    "threshold": module.threshold,
                    "clip_ratio": module.coefficient,
                }
                for module in self.modules
            },
        }


def fit_message(fit: Fit) -> str:
    """What the log says about a fitted alpha."""
    error = "unknown (fewer than two terms)" if math.isnan(fit.standard_error) else f"{fit.standard_error:.3g}"
    held = f"; held there, the regression asked for {fit.unclamped:.4g}" if fit.clamped else "; not clamped"
    return f"CMSA alpha = {fit.alpha:.4f}, standard error {error}, from {fit.terms} terms{held}"

"""How gradients are clipped: the options, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

ClipMode = Literal["stock", "cmsa"]
NonFinite = Literal["stock", "skip"]


@dataclass(frozen=True)
class ClipConfig:
    """Gradient clipping. By default everything is the framework's own.

    Attributes:
        mode: ``stock``, or ``cmsa``: each module's gradient norm is clipped to a threshold of its own.
        alpha: how much a module's threshold follows the spread of its gradients: a number from 0 to 1, or ``auto``
            (fitted in the first 11 steps).
        nonfinite: ``skip`` leaves a step with non-finite gradients out on all ranks alike; ``stock`` does what the
            framework does. ``cmsa`` always skips.
        base: norm to which thresholds refer; None takes the framework's clipping norm.
        mpus: which parameters make up a module: a mapping of name patterns to names of modules, or the path of a YAML
            file that holds one; None finds them by name.
        gvc_max: largest coefficient of variation that raises a threshold.
        ridge: penalty on alpha in the fit.
        recalibrate_steps: steps after which alpha is fitted anew; 0: only when asked to.
    """

    mode: ClipMode = "stock"
    alpha: str | float = "auto"
    nonfinite: NonFinite = "stock"
    base: float | None = None
    mpus: str | Mapping[str, str] | None = None
    gvc_max: float = 10.0
    ridge: float = 1.0
    recalibrate_steps: int = 0

    def __post_init__(self) -> None:
        for key, known in (("mode", get_args(ClipMode)), ("nonfinite", get_args(NonFinite))):
            if getattr(self, key) not in known:
                raise ValueError(f"clip.{key}={getattr(self, key)!r} is unknown; choose one of {', '.join(known)}")
        object.__setattr__(self, "alpha", _alpha(self.alpha))
        for key in ("base", "gvc_max", "ridge"):
            value = getattr(self, key)
            if value is not None and not (_is_number(value) and value >= 0 and math.isfinite(value)):
                raise ValueError(f"clip.{key}={value!r} must be a finite number, 0 or more")
        if self.base == 0:
            raise ValueError("clip.base=0 would clip every gradient to nothing; give a norm above 0, e.g. 1.0")
        steps = self.recalibrate_steps
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"clip.recalibrate_steps={steps!r} must be a whole number of steps, 0 or more")
        if not (self.mpus is None or isinstance(self.mpus, str | Mapping)):
            raise ValueError(f"clip.mpus={self.mpus!r} must be a mapping of name patterns to modules, or a YAML file")

    @property
    def is_cmsa(self) -> bool:
        """Whether modules have thresholds of their own."""
        return self.mode == "cmsa"

    @property
    def skips_nonfinite(self) -> bool:
        """Whether a step with non-finite gradients is left out."""
        return self.is_cmsa or self.nonfinite == "skip"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _alpha(value: object) -> str | float:
    if value == "auto":
        return "auto"
    try:
        number = float(value) if isinstance(value, str) or _is_number(value) else math.nan  # type: ignore[arg-type]
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise ValueError(f"clip.alpha={value!r} must be auto or a number from 0 to 1, e.g. 0.35")
    return number

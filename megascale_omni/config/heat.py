"""How used experts are told from unused ones: the options, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megascale_omni.config.sizes import check_number

Frozen = Literal["wake", "reroute"]


@dataclass(frozen=True)
class HeatConfig:
    """How used experts are told from unused ones, and what happens to these. Only ``frozen: reroute`` changes results.

    Attributes:
        enabled: whether heat is kept at all. window_steps: steps that count. refresh_steps: steps between two looks.
        compute_weight, memory_weight, communication_weight: what a score is made of; they add up to 1.
        hot_percentile, cold_percentile: of a module's scores; cold experts have also had no token for cold_steps.
        freeze: whether cold experts' pages leave the device at once. frozen: what a frozen expert's tokens do: ``wake``
            it, or go to the next-best expert (``reroute``, which changes the mathematics).
        probe_share: share of the frozen experts that are tried out when the cold threshold rises.
        probe_seconds: how fast one must answer to wake.
        alarm_percentile, alarm_hours: an expert that is below it for so long is warned of.
    """

    enabled: bool = True
    window_steps: int = 100
    refresh_steps: int = 10
    compute_weight: float = 0.5
    memory_weight: float = 0.3
    communication_weight: float = 0.2
    hot_percentile: float = 90.0
    cold_percentile: float = 30.0
    cold_steps: int = 5
    freeze: bool = True
    frozen: Frozen = "wake"
    probe_share: float = 0.05
    probe_seconds: float = 0.5
    alarm_percentile: float = 10.0
    alarm_hours: float = 24.0

    def __post_init__(self) -> None:
        for key in ("enabled", "freeze"):
            if not isinstance(getattr(self, key), bool):
                raise ValueError(f"heat.{key}={getattr(self, key)!r} must be true or false")
        if self.frozen not in get_args(Frozen):
            known = ", ".join(get_args(Frozen))
            raise ValueError(f"heat.frozen={self.frozen!r} is unknown; choose one of {known}")
        if self.frozen == "reroute" and not (self.enabled and self.freeze):
            raise ValueError("heat.frozen=reroute freezes nothing where heat.enabled or heat.freeze is false; set both")
        for key in ("window_steps", "refresh_steps", "cold_steps"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"heat.{key}={value!r} must be a whole number of steps, 1 or more")
        for key in ("compute_weight", "memory_weight", "communication_weight", "probe_share"):
            check_number("heat", self, key, most=1.0, what="between 0 and 1")
        for key in ("hot_percentile", "cold_percentile", "alarm_percentile"):
            check_number("heat", self, key, most=100.0, what="a percentile between 0 and 100")
        for key in ("probe_seconds", "alarm_hours"):
            check_number("heat", self, key, most=float("inf"), what="0 or more")
        self._check_together()

    def _check_together(self) -> None:
        total = self.compute_weight + self.memory_weight + self.communication_weight
        if abs(total - 1.0) > 1e-6:
            raise ValueError(
                f"heat: compute_weight {self.compute_weight:g}, memory_weight {self.memory_weight:g} and "
                f"communication_weight {self.communication_weight:g} add up to {total:g}; they must add up to 1"
            )
        if self.cold_percentile >= self.hot_percentile:
            raise ValueError(
                f"heat.cold_percentile={self.cold_percentile:g} is not below hot_percentile={self.hot_percentile:g}: "
                "an expert would be hot and cold at once; lower the one or raise the other"
            )
        if self.alarm_percentile > self.cold_percentile:
            raise ValueError(
                f"heat.alarm_percentile={self.alarm_percentile:g} is above cold_percentile={self.cold_percentile:g}: "
                "the alarm would ring for experts that are not cold; lower it"
            )
        if self.window_steps < self.refresh_steps:
            raise ValueError(
                f"heat.window_steps={self.window_steps} is shorter than refresh_steps={self.refresh_steps}; "
                "lengthen the one or shorten the other"
            )
        rest = self.window_steps % self.refresh_steps
        if rest:
            raise ValueError(
                f"heat.window_steps={self.window_steps} is no multiple of refresh_steps={self.refresh_steps}, and "
                f"steps are counted in parts of these; give {self.window_steps - rest}"
            )

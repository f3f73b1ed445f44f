"""What the steps of all ranks come to: bounds kept or not, and the JSON of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from scripts.exactness.deviations import (
    BOUNDS,
    CONTROL,
    MEGASCALE,
    STOCK,
    Deviation,
    FreeStep,
    MutatedStep,
    ProvedStep,
)
from scripts.exactness.layouts import Layout
from scripts.measuring.statistics import largest_relative_difference

BF16_FACTOR = 2.0
"""How many times the control's deviation MegaScale's may be in bf16."""
FREE_RUN_BOUND = 1e-5
"""How far losses of free fp32 runs may be apart, relative."""
LEARNED_NATS = 1.5
"""By how much the loss of a free run must fall, or it proves nothing."""
_EXACT_IN_BF16 = ("rounding",)


@dataclass(frozen=True)
class Worst:
    """The worst deviation of one kind over all steps and ranks."""

    kind: str
    value: float
    where: str
    step: int
    rank: int

    @property
    def share(self) -> float:
        """Of the fp32 bound."""
        return Deviation(self.kind, self.value, self.where).share


def worst_of(steps_by_rank: Sequence[Sequence[Sequence[Deviation]]]) -> dict[str, Worst]:
    """The worst of each kind, from deviations by rank and step."""
    found: dict[str, Worst] = {}
    for rank, steps in enumerate(steps_by_rank):
        for step, deviations in enumerate(steps):
            for one in deviations:
                if one.kind not in found or _size(one.value) > _size(found[one.kind].value):
                    found[one.kind] = Worst(one.kind, one.value, one.where, step + 1, rank)
    return found


def _size(value: float) -> float:
    return math.inf if math.isnan(value) else value


@dataclass(frozen=True)
class FreeRun:
    """Losses of whole runs that began equal."""

    losses: dict[str, list[float]]
    initial_differences: list[str]
    """Tensors whose initial weights are not stock's."""

    @property
    def learned(self) -> float:
        """By how much stock's loss fell, from the first step to the mean of the last five."""
        losses = self.losses[STOCK]
        return losses[0] - sum(losses[-5:]) / len(losses[-5:])

    def deviation(self, name: str) -> float:
        """The largest relative difference of a side's losses from stock's."""
        return largest_relative_difference(self.losses[name], self.losses[STOCK])


@dataclass(frozen=True)
class Verdict:
    """One layout's proof. Parts that were not run are None."""

    layout: Layout
    steps: int
    seconds: float
    initial_differences: list[str] = field(default_factory=list)
    megascale: dict[str, Worst] | None = None
    control: dict[str, Worst] | None = None
    mutant: Mutant | None = None
    free: FreeRun | None = None

    def share(self, worst: Worst) -> float:
        """A deviation of MegaScale as a share of what is allowed: fp32 bounds, or in bf16 twice the control's."""
        if not self.layout.is_bf16 or worst.kind in _EXACT_IN_BF16:
            return worst.share
        assert self.control is not None
        allowed = BF16_FACTOR * self.control[worst.kind].value
        if worst.value == 0:
            return 0.0
        return worst.value / allowed if allowed > 0 else math.inf

    @property
    def worst_share(self) -> float:
        """The largest share of MegaScale's deviations; initial weights that differ are over any bound."""
        shares = [self.share(worst) for worst in (self.megascale or {}).values()]
        return math.inf if self.initial_differences else max(map(_size, shares), default=math.inf)

    @property
    def control_share(self) -> float:
        """The control's largest share of the fp32 bounds."""
        return max((_size(worst.share) for worst in (self.control or {}).values()), default=math.inf)

    @property
    def free_share(self) -> float:
        """The free run's deviation as a share of what is allowed."""
        if self.free is None or self.free.initial_differences:
            return math.inf
        deviation = self.free.deviation(MEGASCALE)
        if not self.layout.is_bf16:
            return deviation / FREE_RUN_BOUND
        allowed = BF16_FACTOR * self.free.deviation(CONTROL)
        return 0.0 if deviation == 0 else (deviation / allowed if allowed > 0 else math.inf)

    @property
    def passes(self) -> bool:
        """Every part that was run keeps its bounds: MegaScale's steps, the control's (fp32), mutant, free run."""
        parts = []
        if self.megascale is not None:
            parts.append(self.worst_share <= 1)
        if self.control is not None and not self.layout.is_bf16:
            parts.append(self.control_share <= 1)
        if self.mutant is not None:
            parts.append(self.mutant.caught)
        if self.free is not None:
            parts.append(self.free.learned >= LEARNED_NATS)
            if MEGASCALE in self.free.losses:
                parts.append(self.free_share <= 1)
        return bool(parts) and all(parts)

    def as_json(self) -> dict[str, object]:
        """The layout's entry in the file."""
        return {
            "layout": self.layout.name,
            "what": self.layout.what,
            "ranks": self.layout.ranks,
            "steps": self.steps,
            "passes": self.passes,
            "initial_weights_that_differ": self.initial_differences,
            "checks": [] if self.megascale is None else [self._check(worst) for worst in self.megascale.values()],
            "control_checks": [
                {"kind": w.kind, "worst": w.value, "where": w.where, "step": w.step, "rank": w.rank}
                for w in (self.control or {}).values()
            ],
            "worst_share_of_bound": None if self.megascale is None else self.worst_share,
            "control_worst_share_of_bound": None if self.control is None else self.control_share,
            "mutant": None if self.mutant is None else self.mutant.as_json(),
            "free_run": None if self.free is None else self._free_json(self.free),
            "seconds": round(self.seconds, 2),
        }

    def _check(self, worst: Worst) -> dict[str, object]:
        share = self.share(worst)
        control = (self.control or {}).get(worst.kind)
        return {
            "kind": worst.kind,
            "worst": worst.value,
            "where": worst.where,
            "step": worst.step,
            "rank": worst.rank,
            "bound": None if self.layout.is_bf16 and worst.kind not in _EXACT_IN_BF16 else BOUNDS[worst.kind],
            "control": None if control is None else control.value,
            "share_of_bound": share,
            "met": share <= 1,
        }

    def _free_json(self, free: FreeRun) -> dict[str, object]:
        return {
            "losses": free.losses,
            "learned_nats": free.learned,
            "learned_at_least": LEARNED_NATS,
            "deviation": free.deviation(MEGASCALE) if MEGASCALE in free.losses else None,
            "control_deviation": free.deviation(CONTROL) if CONTROL in free.losses else None,
            "bound": None if self.layout.is_bf16 else FREE_RUN_BOUND,
            "share_of_bound": self.free_share if MEGASCALE in free.losses else None,
            "initial_weights_that_differ": free.initial_differences,
        }


@dataclass(frozen=True)
class Mutant:
    """Whether a wrong gradient of one expert was seen, and where."""

    expert: str
    """Prefix of the names of the tensors that were made wrong."""
    gradient: Worst
    """The worst gradient deviation of the steps."""

    @property
    def caught(self) -> bool:
        """Seen: the gradient breaks its bound, and the tensor that is named is one of the expert's."""
        return self.gradient.share > 1 and self.gradient.where.startswith(self.expert)

    def as_json(self) -> dict[str, object]:
        """For the file."""
        return {
            "expert": self.expert,
            "caught": self.caught,
            "gradient_deviation": self.gradient.value,
            "share_of_bound": self.gradient.share,
            "where": self.gradient.where,
        }


def judge_steps(steps: Sequence[Sequence[ProvedStep]]) -> dict[str, dict[str, Worst]]:
    """Worst deviations by side, from every rank's steps."""
    names: Iterable[str] = steps[0][0].deviations
    return {name: worst_of([[step.deviations[name] for step in rank] for rank in steps]) for name in names}


def judge_mutant(steps: Sequence[Sequence[MutatedStep]]) -> Mutant:
    """Rank 0 mutates, so rank 0's names count. Raises RuntimeError when there was no expert to mutate."""
    expert = steps[0][0].expert
    if expert is None:
        raise RuntimeError("rank 0 has no expert with a gradient: there is no mutant to catch")
    return Mutant(expert, worst_of([[step.deviations for step in steps[0]]])["gradient"])


def judge_free(steps: Sequence[FreeStep], initial_differences: list[str]) -> FreeRun:
    """Losses are the same on every rank: those of rank 0."""
    return FreeRun({name: [step.losses[name] for step in steps] for name in steps[0].losses}, initial_differences)

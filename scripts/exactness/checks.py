"""How far a side is from stock after the same step. `deviations` has the bounds and says what is compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from scripts.exactness.deviations import Deviation
from scripts.exactness.state import State, Tensors
from scripts.measuring.statistics import relative_difference


@dataclass(frozen=True)
class Outcome:
    """What one side did in one step."""

    loss: float
    grad_norm: float
    routing: Sequence[torch.Tensor]
    gradients: Tensors
    after: State


def compare(outcome: Outcome, stock: Outcome, *, before: State) -> list[Deviation]:
    """One deviation of each kind, against stock's step from the same `before`."""
    gradients = {name: relative_norm(outcome.gradients[name], g) for name, g in stock.gradients.items()}
    updates = _updates(outcome.after.masters, stock.after.masters, before.masters)
    return [
        Deviation("routing", float(routing_differences(outcome.routing, stock.routing)), ""),
        Deviation("loss", relative_difference(outcome.loss, stock.loss), ""),
        Deviation("grad_norm", relative_difference(outcome.grad_norm, stock.grad_norm), ""),
        worst("gradient", gradients),
        worst("update", updates),
        worst(
            "moment",
            {
                f"{name} ({key})": relative_norm(outcome.after.moments[key][name], moment)
                for key, moments in stock.after.moments.items()
                for name, moment in moments.items()
            },
        ),
        worst("rounding", _unrounded(outcome.after)),
        typical("typical_gradient", gradients),
        typical("typical_update", updates),
    ]


def routing_differences(routing: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> int:
    """Entries of routing maps that differ; every entry where the calls do not even match."""
    if len(routing) != len(reference) or any(a.shape != b.shape for a, b in zip(routing, reference, strict=True)):
        return max(1, sum(map_.numel() for map_ in reference))
    return sum(int((a != b).sum()) for a, b in zip(routing, reference, strict=True))


def relative_norm(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    """`||tensor - reference|| / ||reference||`; where the reference is zero, infinite unless the tensor is, too."""
    difference = float(torch.linalg.vector_norm(tensor - reference))
    size = float(torch.linalg.vector_norm(reference))
    if difference == 0:
        return 0.0
    return difference / size if size > 0 else math.inf


def unit_in_last_place(tensor: torch.Tensor) -> torch.Tensor:
    """The distance of fp32 neighbours at each element; 0 at 0."""
    _, exponent = torch.frexp(tensor)
    units = torch.ldexp(torch.ones_like(tensor), exponent - 24)
    return torch.where(tensor == 0, torch.zeros_like(tensor), units)


def update_deviation(after: torch.Tensor, reference: torch.Tensor, before: torch.Tensor) -> float:
    """How far two updates of the same weights are apart; see [Note: rounding of stored weights] in deviations."""
    unit = unit_in_last_place(torch.maximum(after.abs(), reference.abs()))
    beyond = ((after - reference).abs() - unit).clamp_(min=0)
    size = float(torch.linalg.vector_norm(reference - before))
    difference = float(torch.linalg.vector_norm(beyond))
    if difference == 0:
        return 0.0
    return difference / size if size > 0 else math.inf


def worst(kind: str, values: Mapping[str, float]) -> Deviation:
    """The largest of deviations by name; one that is not a number is worse than any."""
    if not values:
        return Deviation(kind, 0.0, "")
    name = max(values, key=lambda key: math.inf if math.isnan(values[key]) else values[key])
    return Deviation(kind, values[name], name)


def typical(kind: str, values: Mapping[str, float]) -> Deviation:
    """The median of deviations by name; not a number where one of them is not."""
    broken = any(math.isnan(value) for value in values.values())
    return Deviation(kind, math.nan if broken else statistics.median(values.values()) if values else 0.0, "")


def _updates(after: Tensors, reference: Tensors, before: Tensors) -> dict[str, float]:
    return {name: update_deviation(after[name], reference[name], before[name]) for name in reference}


def _unrounded(state: State) -> dict[str, float]:
    """Elements of weights that are not their rounded main weights, by tensor."""
    return {
        name: float((weight != state.masters[name].to(weight.dtype)).sum()) for name, weight in state.weights.items()
    }

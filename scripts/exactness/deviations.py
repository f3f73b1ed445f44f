"""How far a side may be from stock after the same step.

[Note: bounds in fp32]
    routing      identical: no token on any router call goes elsewhere
    loss         1e-6 of stock's
    grad_norm    1e-6 of stock's
    gradient     1e-5 of the norm of stock's gradient, tensor by tensor
    update       1e-5 of the norm of stock's update, tensor by tensor, beyond the rounding of stored weights (below)
    moment       1e-5 of the norm of stock's moment (both of Adam's), tensor by tensor
    rounding     weights in the training dtype are exactly the rounded main weights
    typical_...  the median over tensors: in bf16, where one token that goes elsewhere makes the worst, it tells more

[Note: rounding of stored weights]
An update is the difference of weights before and after. Two updates that differ by nothing but the last bit of a sum
may be stored one unit in the last place of the weight apart, which for a weight of 1 and a learning rate of 3e-4 is
4e-4 of the update: no order of sums but stock's own would pass. So what counts is what two weights differ by beyond
that one unit. The moments, stored relative to their own size, are compared without any such allowance.
"""

from __future__ import annotations

from dataclasses import dataclass

BOUNDS: dict[str, float] = {
    "routing": 0.0,
    "loss": 1e-6,
    "grad_norm": 1e-6,
    "gradient": 1e-5,
    "update": 1e-5,
    "moment": 1e-5,
    "rounding": 0.0,
    "typical_gradient": 1e-5,
    "typical_update": 1e-5,
}


@dataclass(frozen=True)
class Deviation:
    """The worst deviation of one kind in one step on one rank."""

    kind: str
    value: float
    where: str
    """The tensor, or empty."""

    @property
    def share(self) -> float:
        """Of the fp32 bound: at most 1 is within. Where nothing may deviate: 0, or above 1."""
        bound = BOUNDS[self.kind]
        if bound:
            return self.value / bound
        return 0.0 if self.value == 0 else 1.0 + self.value

    @property
    def within(self) -> bool:
        """Whether it keeps the fp32 bound; not a number does not."""
        return self.share <= 1.0


STOCK, CONTROL, MEGASCALE = "stock", "control", "megascale"
"""The sides: the reference, stock with each expert computed in two halves, and what is proved."""


@dataclass(frozen=True)
class ProvedStep:
    """One step of every side from the same state, as one rank saw it."""

    loss: float
    """Stock's."""
    deviations: dict[str, list[Deviation]]
    """By side: one of each kind."""


@dataclass(frozen=True)
class MutatedStep:
    """A step in which one expert's gradient was wrong on purpose, on rank 0."""

    expert: str | None
    """The prefix of its tensors' names; None on other ranks."""
    deviations: list[Deviation]


@dataclass(frozen=True)
class FreeStep:
    """A step of every side, each from its own last one."""

    losses: dict[str, float]
    grad_norms: dict[str, float]

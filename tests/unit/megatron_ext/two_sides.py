"""A layer with stock's experts beside one with experts in pages, trained alike and compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tests.distributed.megatron_state import fresh_parallel_state
from tests.unit.megatron_ext.layers import Side, build

EVERYWHERE: Sequence[Iterable[int]] = [[0, 1], [1, 2], [2, 3], [3, 0], [0, 2]]
WITHOUT_3: Sequence[Iterable[int]] = [[0, 1], [1, 2], [2, 0], [1], [0, 2]]

KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "biases": {"bias": True, "gated": False},
    "bf16": {"bf16": True, "bias": True},
    "distributed": {"distributed": True, "bias": True},
    "clipped": {"clip_grad": 0.05},
}


def two_sides(**options: Any) -> tuple[Side, Side]:
    fresh_parallel_state()
    return build(megascale=False, **options), build(megascale=True, **options)


def assert_close(stock: dict[str, torch.Tensor], paged: dict[str, torch.Tensor]) -> None:
    """Equal names, and differences within 1e-4 of each tensor's norm; NaN where the other has NaN.

    At this rate of learning a step moves weights by half their size, and Adam makes as much of a tiny gradient as of a
    large one: rounding grows to some 1e-5 over a few steps, and whatever is wrong to much more than 1e-4.
    """
    assert stock.keys() == paged.keys()
    for name, tensor in stock.items():
        nan = torch.isnan(tensor)
        assert torch.equal(nan, torch.isnan(paged[name])), name
        difference = torch.where(nan, 0.0, tensor.double() - paged[name].double())
        norm = torch.where(nan, 0.0, tensor.double()).norm()
        assert difference.norm() <= 1e-4 * norm + 1e-9, f"{name}: {float(difference.norm())} of {float(norm)}"


def as_named(*tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(zip(("output", "gradient of tokens", "gradient of probabilities"), tensors, strict=True))


def experts_with_gradient(side: Side) -> set[int]:
    """Local experts that have a gradient page."""
    return {expert for expert, _ in side.ddp.gradients.present(side.layer.experts)}


def train_both(stock: Side, paged: Side, *micro_batches: tuple[torch.Tensor, Sequence[Iterable[int]]]) -> None:
    """A step of both sides; everything that it gives and changes is compared."""
    given = []
    for side in (stock, paged):
        side.clear()
        for x_Th, routes in micro_batches:
            last = side.forward_backward(x_Th, routes)
        side.reduce()
        gradients = side.experts_gradients()
        successful, norm, zeros = side.step()
        assert successful
        scalars = {"norm": torch.tensor(norm), "zeros": torch.tensor(zeros)}
        given.append({**as_named(*last), **gradients, **scalars, **side.tensors()})
    assert_close(*given)

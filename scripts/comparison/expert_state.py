"""Bytes of expert state that a rank holds: weights, gradients, main weights, Adam's moments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from megascale_omni.experts.overview import managers
from scripts.measuring.stepped import SteppedParameters


def is_expert_parameter(name: str) -> bool:
    """Whether a stock parameter belongs to routed experts (shared experts are dense)."""
    return ".experts." in name and ".shared_experts." not in name


def stock_expert_bytes(model: Sequence[torch.nn.Module], optimizer: object) -> int:
    """Bytes of this rank's resident expert state in a stock model: every piece of memory counted once."""
    steppers = SteppedParameters(optimizer)
    spans: list[tuple[int, int]] = []
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if is_expert_parameter(name):
                spans += [_span(tensor) for tensor in _tensors_of(parameter, steppers)]
    return union_length(spans)  # the shard that a distributed optimizer steps may be a piece of the weight itself


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()


def union_length(spans: Iterable[tuple[int, int]]) -> int:
    """How much the spans (start, end) cover together."""
    covered, reached = 0, 0
    for start, end in sorted(spans):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _tensors_of(parameter: torch.nn.Parameter, steppers: SteppedParameters) -> Iterator[torch.Tensor]:
    """Contiguous tensors: weight, gradients, main weight, moments."""
    yield parameter.data
    stepped = steppers.find(parameter)
    main = None if stepped is None else stepped.main
    gradients = [parameter.grad, getattr(parameter, "main_grad", None), None if main is None else main.grad]
    yield from (gradient for gradient in gradients if gradient is not None)
    if stepped is not None:
        yield stepped.main.data
        yield from (v for v in stepped.state.values() if isinstance(v, torch.Tensor) and v.dim())


def resident_expert_bytes(model: Sequence[torch.nn.Module], optimizer: object) -> int:
    """Bytes of this rank's resident expert state, in pages or as stock keeps it."""
    owners = managers(model)
    if owners:
        return sum(sum(owner.resident_bytes().values()) for owner in owners)
    return stock_expert_bytes(model, optimizer)

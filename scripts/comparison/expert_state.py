"""Bytes of expert state that a rank holds: weights, gradients, main weights, Adam's moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megascale_omni.paging.manager import ExpertManager


def is_expert_parameter(name: str) -> bool:
    """Whether a stock parameter belongs to routed experts (shared experts are dense)."""
    return ".experts." in name and ".shared_experts." not in name


def optimizer_members(optimizer: object) -> list[object]:
    """The optimizers of a chain, or the one that there is."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def inner_states(optimizer: object) -> dict[torch.Tensor, Mapping[str, object]]:
    """Adam's state by the parameter that the torch optimizer steps: the main one where there is one."""
    states: dict[torch.Tensor, Mapping[str, object]] = {}
    for member in optimizer_members(optimizer):
        inner = getattr(member, "optimizer", None)
        if inner is not None:
            states.update(inner.state)
    return states


def stock_expert_bytes(model: list[torch.nn.Module], optimizer: object) -> int:
    """Bytes of this rank's resident expert state in a stock model: every tensor counted once."""
    states = inner_states(optimizer)
    tensors = [
        tensor
        for chunk in model
        for name, parameter in chunk.named_parameters()
        if is_expert_parameter(name)
        for tensor in _tensors_of(parameter, states)
    ]
    seen: dict[tuple[int, int], int] = {}
    for tensor in tensors:  # a main weight of fp32 training is a view of the weight
        key = (tensor.data_ptr(), tensor.numel() * tensor.element_size())
        seen[key] = key[1]
    return sum(seen.values())


def _tensors_of(
    parameter: torch.nn.Parameter, states: Mapping[torch.Tensor, Mapping[str, object]]
) -> Iterator[torch.Tensor]:
    yield parameter.data
    main = getattr(parameter, "main_param", parameter)
    gradients = [parameter.grad, getattr(parameter, "main_grad", None), getattr(main, "grad", None)]
    yield from (gradient for gradient in gradients if gradient is not None)
    if main is None:  # this rank steps no part of it
        return
    if main.dtype is not parameter.dtype:
        yield main.data
    yield from (value for value in states.get(main, {}).values() if isinstance(value, torch.Tensor) and value.dim())


def page_managers(model: list[torch.nn.Module]) -> list[ExpertManager]:
    """The page managers behind a model; none where it is stock."""
    from megascale_omni.experts.module import PagedExperts

    modules = (module for chunk in model for module in chunk.modules() if isinstance(module, PagedExperts))
    return list(dict.fromkeys(module.manager for module in modules))


def resident_expert_bytes(model: list[torch.nn.Module], optimizer: object) -> int:
    """Bytes of this rank's resident expert state, in pages or as stock keeps it."""
    managers = page_managers(model)
    if managers:
        return sum(sum(manager.resident_bytes().values()) for manager in managers)
    return stock_expert_bytes(model, optimizer)

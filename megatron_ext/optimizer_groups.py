"""Stock's parameter groups with experts in them: which ones pages belong to, and in what order stock lists them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.optimizer import _get_param_groups
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megascale_omni.optimizer.paged_adam import GroupBinding
from megascale_omni.ranks import all_or_none
from megatron_ext.distributed import MegaScaleDDP
from megatron_ext.experts import SOURCE, MegaScaleExperts
from megatron_ext.optimizer_state import GroupPlaces


def listed_groups(
    config: OptimizerConfig,
    model_chunks: Sequence[MegaScaleDDP],
    overrides: dict[Any, Any] | None,
    *,
    expert_parallel: bool,
) -> list[dict[str, Any]]:
    """Stock's groups, experts included as stand-ins, of the optimizer that steps experts. A collective of all ranks."""
    with ExitStack() as stack:
        for chunk in model_chunks:
            for module in chunk.paged_experts:
                stack.enter_context(module.visible())
        groups: list[dict[str, Any]] = _get_param_groups(list(model_chunks), config, overrides)
    return [group for group in groups if group["is_expert_parallel"]] if expert_parallel else groups


def places(listed: list[dict[str, Any]], dense: ChainedOptimizer, *, expert_parallel: bool) -> GroupPlaces:
    """Which of the listed groups are the dense optimizer's, and which are the experts' (or nobody's, on this rank)."""
    if expert_parallel:  # two lists
        return GroupPlaces(dense=tuple(range(len(dense.param_groups))), paged=tuple(range(len(listed))))
    place_of_dense: list[int] = []
    for group in dense.param_groups:
        # The dense optimizer's groups are some of the listed ones, in their order; torch and schedulers add settings.
        first = place_of_dense[-1] + 1 if place_of_dense else 0
        same = (i for i in range(first, len(listed)) if _is_same_group(listed[i], group))
        place = next(same, None)
        if place is None:
            raise RuntimeError(f"stock's dense optimizer has a group that the whole model has not: {_settings(group)}")
        place_of_dense.append(place)
    paged = [i for i, group in enumerate(listed) if _has_experts(group) or i not in place_of_dense]
    return GroupPlaces(dense=tuple(place_of_dense), paged=tuple(paged))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _is_same_group(listed: dict[str, Any], group: dict[str, Any]) -> bool:
    return all(key in group and group[key] == value for key, value in _settings(listed).items())


def _has_experts(group: dict[str, Any]) -> bool:
    return any(hasattr(parameter, SOURCE) for parameter in group["params"])


def bindings(
    groups: Sequence[dict[str, Any]], model_chunks: Sequence[MegaScaleDDP]
) -> dict[MegaScaleExperts, GroupBinding]:
    """Which of ``groups`` the weights and the biases of each module belong to; frozen modules have none. A collective.

    Raises:
        ValueError: on every rank, where stock would put tensors of one module into different groups.
    """
    weights, biases = all_or_none(lambda: _groups_of(groups))
    experts = [module for chunk in model_chunks for module in chunk.paged_experts]
    return {module: GroupBinding(weights[module], biases.get(module)) for module in experts if module in weights}


def _groups_of(groups: Sequence[dict[str, Any]]) -> tuple[dict[MegaScaleExperts, int], dict[MegaScaleExperts, int]]:
    """By module, the groups of its weights and of its biases."""
    weights: dict[MegaScaleExperts, int] = {}
    biases: dict[MegaScaleExperts, int] = {}
    for index, group in enumerate(groups):
        for module, name in (getattr(p, SOURCE) for p in group["params"] if hasattr(p, SOURCE)):
            target = biases if name.endswith(".bias") else weights
            if target.setdefault(module, index) != index:
                raise ValueError(
                    f"{module.path}: experts of one module cannot be in different parameter groups with --megascale; "
                    f"{name} is in another one than its siblings"
                )
    return weights, biases


def without_parameters(group: dict[str, Any], config: OptimizerConfig) -> dict[str, Any]:
    """A stock group as PagedAdam's; torch.optim gives it what it does not set itself."""
    return {**_torch_defaults(config), **_settings(group), "params": []}


def _torch_defaults(config: OptimizerConfig) -> dict[str, Any]:
    inner = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
    probe = inner(
        [torch.nn.Parameter(torch.empty(0))],
        lr=config.lr,
        weight_decay=config.weight_decay,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
    )
    return {key: value for key, value in probe.param_groups[0].items() if key != "params"}

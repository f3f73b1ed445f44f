"""What a trainer's state is, by stock's names, and where two states or two checkpoints differ. For ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from scripts.moe_trainer.trainer import Trainer

GROUP_KEY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "max_lr", "min_lr")


def tensors_of(run: Trainer) -> dict[str, torch.Tensor]:
    """Copies of every weight, fp32 master and moment of this rank, whole, by kind and stock's name. A collective."""
    from scripts.exactness.state import ModelState

    state = ModelState(run.model, run.optimizer, distributed=run.args.use_distributed_optimizer)
    frozen = _frozen_weights(run)
    state._paged = {prefix: module for prefix, module in state._paged.items() if module.trainable}
    found = state.state()
    kinds = {"frozen": frozen, "weight": found.weights, "master": found.masters, **found.moments}
    return {f"{kind} {name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}


def _frozen_weights(run: Trainer) -> dict[str, torch.Tensor]:
    """Weights that no optimizer steps, by the names that they have in their modules."""
    found: dict[str, torch.Tensor] = {}
    for index, chunk in enumerate(run.model):
        for name, module in chunk.named_modules():
            tensors: dict[str, torch.Tensor] = {}
            if not getattr(module, "trainable", True):
                tensors = module.dense()
            tensors |= {n: p for n, p in module.named_parameters(recurse=False) if not p.requires_grad}
            found |= {f"{index}.{name}.{n}".removesuffix("."): tensor.detach().clone() for n, tensor in tensors.items()}
    return found


def groups_of(run: Trainer) -> dict[tuple[object, ...], dict[str, object]]:
    """Settings of every parameter group by what tells groups apart; equal keys must hold equal settings."""
    found: dict[tuple[object, ...], dict[str, object]] = {}
    for group in run.optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "step")}
        key = tuple(group[name] for name in GROUP_KEY)
        assert found.setdefault(key, settings) == settings, f"groups {key} differ: {found[key]} and {settings}"
    return found


def steps_of(run: Trainer) -> set[int]:
    """The numbers of applied steps that the optimizers' members hold, per parameter and for the pages."""
    steps: set[int] = set()
    for member in run.optimizer.chained_optimizers:
        if hasattr(member, "adam"):
            steps.add(member.adam.num_steps)
        elif member.optimizer is not None:
            steps |= {int(state["step"]) for state in member.optimizer.state.values()}
    return steps


def position_of(run: Trainer) -> dict[str, object]:
    """Where the run stands: iteration, data, schedule, rates."""
    return {
        "iteration": run.iteration,
        "samples": run.consumed_samples,
        "scheduled": run.scheduler.num_steps,
        "rate": run.learning_rate,
        "steps": steps_of(run),
    }


State = tuple[dict[str, torch.Tensor], dict[tuple[object, ...], dict[str, object]], dict[str, object]]


def state_of(run: Trainer) -> State:
    """Tensors, parameter groups and position."""
    return tensors_of(run), groups_of(run), position_of(run)


def differing(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> list[str]:
    """Names that only one has, or whose tensors differ in a bit, a shape or a dtype."""
    names = sorted(first.keys() ^ second.keys())
    return names + [n for n in sorted(first.keys() & second.keys()) if not same_bits(first[n], second[n])]


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors are equal, NaN where the other is NaN included."""
    return (
        first.dtype is second.dtype
        and first.shape == second.shape
        and torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
    )


def stored_common(path: str | Path) -> dict[str, Any]:
    """What a checkpoint holds beside tensors and objects of ranks, flat, without the arguments."""
    from megatron.core import dist_checkpointing
    from megatron.core.safe_globals import register_safe_globals

    register_safe_globals()
    common = dist_checkpointing.load_common_state_dict(str(path))
    args = common.pop("args")
    flat = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in _flat(common).items()}
    return {**flat, "args.consumed_train_samples": args.consumed_train_samples}


def stored_keys(path: str | Path) -> dict[str, tuple[object, ...]]:
    """Keys of all tensors and objects in a checkpoint, with tensors' global shapes and dtypes."""
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

    metadata = load_sharded_metadata(str(path))
    return {k: (tuple(getattr(e, "global_shape", ())), str(getattr(e, "dtype", ""))) for k, e in metadata.items()}


def _flat(value: object, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    else:
        return {prefix: value}
    found = {f"{prefix}/": type(value).__name__}
    for key, item in items:
        found |= _flat(item, f"{prefix}/{key}")
    return found

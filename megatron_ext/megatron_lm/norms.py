"""``--log-params-norm``: Megatron-LM's norm is over ``parameters()``, which do not list experts in pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from megatron_ext.megatron_lm import session
from megatron_ext.megatron_lm.hooks import argument, wrap


def hook(module: ModuleType) -> None:
    """Hooks ``calc_params_l2_norm`` where ``megatron.training.training`` calls it."""
    wrap(module, "calc_params_l2_norm", _norm, takes=("model",))


def _norm(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - stock's
    norm = original(*args, **kwargs)
    if session.current() is None:
        return norm
    model = argument(original, "model", args, kwargs)
    return math.sqrt(float(norm) ** 2 + _squares_of_experts(model if isinstance(model, list) else [model]))


def _squares_of_experts(model: Sequence[torch.nn.Module]) -> float:
    """Sum of squares of all experts, each counted once. A collective of all ranks."""
    from megatron.core import parallel_state

    from megatron_ext.experts import MegaScaleExperts

    modules = [module for chunk in model for module in chunk.modules() if isinstance(module, MegaScaleExperts)]
    device = next(model[0].parameters()).device
    total = torch.tensor([sum(m.squared_parameter_norm() for m in modules)], dtype=torch.float64, device=device)
    group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    torch.distributed.all_reduce(total, group=group)
    return float(total.item())

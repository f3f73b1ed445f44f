"""The control: stock with each expert computed in two halves. It shows what the order of sums alone does to a run."""

from __future__ import annotations

import types
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP


def split_experts(model: Sequence[torch.nn.Module]) -> int:
    """From now on every routed expert of the model sums two halves of its hidden neurons. Returns how many experts.

    Raises:
        RuntimeError: the model has no routed experts of stock's class.
    """
    experts = [
        expert
        for chunk in model
        for module in chunk.modules()
        if isinstance(module, SequentialMLP)
        for expert in module.local_experts
    ]
    if not experts:
        raise RuntimeError("no experts to split: the control is made of stock's SequentialMLP")
    for expert in experts:
        expert.forward = types.MethodType(_forward_in_halves, expert)
    return len(experts)


def _forward_in_halves(
    expert: MLP, hidden_nh: torch.Tensor, scale_n: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`MLP.forward` of an expert, `y = act_a Wd_a^T + act_b Wd_b^T` for halves a and b of the neurons.

    The halves are computed and added by stock's own operations in the training dtype, forwards and backwards.
    """
    config, dtype = expert.config, hidden_nh.dtype
    fc1, fc2 = expert.linear_fc1, expert.linear_fc2
    rows = torch.arange(fc1.weight.shape[0]).view(2 if config.gated_linear_unit else 1, -1)
    y_nh: torch.Tensor | None = None
    half = rows.shape[1] // 2
    for start, end in ((0, half), (half, rows.shape[1])):
        own = rows[:, start:end].reshape(-1)
        pre = F.linear(hidden_nh, fc1.weight[own])
        if fc1.bias is not None:
            pre = pre + fc1.bias[own]
        act = _activation(config, pre)
        if scale_n is not None:
            act = (act * scale_n.unsqueeze(-1)).to(dtype)
        part = F.linear(act, fc2.weight[:, start:end])
        y_nh = part if y_nh is None else y_nh + part
    assert y_nh is not None
    if fc2.bias is not None and scale_n is not None:
        return y_nh + fc2.bias.unsqueeze(0) * scale_n.unsqueeze(-1), None
    return y_nh, fc2.bias


def _activation(config: object, pre: torch.Tensor) -> torch.Tensor:
    """Stock's unfused activation (`mlp.py`)."""
    function = config.activation_func  # type: ignore[attr-defined]
    if not config.gated_linear_unit:  # type: ignore[attr-defined]
        return function(pre)
    gate, up = torch.chunk(pre, 2, dim=-1)
    limit = config.activation_func_clamp_value  # type: ignore[attr-defined]
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return function(gate) * (up + config.glu_linear_offset)  # type: ignore[attr-defined]

"""Experts of DeepSpeed's own MoE layer (``deepspeed.moe.layer.MoE``) in pages.

An expert there is any module of the user's. Those with two linear layers around an activation, or three (gate, up,
down), are recognised by computing: the description must give the module's own output. Others are refused by name.

Shape suffixes: G ranks that sent, E local experts, C slots a rank and expert (capacity), h hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from deepspeed_ext.convert import Dtypes, Move, empty, replace_module
from deepspeed_ext.experts import DeepSpeedExperts, broadcast
from deepspeed_ext.recognise import Description, matching
from deepspeed_ext.run import Run
from megascale_omni.experts.activation import Activation
from megascale_omni.paging.layout import ExpertShape

_TOKENS = 32
_Linears = dict[str, nn.Linear]


@dataclass(frozen=True)
class NativeNames:
    """Paths of an expert's linear layers in it: one or two whose rows are gate | up, and the last one."""

    first: tuple[str, ...]
    down: str
    biases: bool


def moe_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """DeepSpeed's MoE layers with their paths."""
    from deepspeed.moe.layer import MoE

    return [(path, module) for path, module in model.named_modules() if isinstance(module, MoE)]


def common_ranks(layers: list[tuple[str, Any]], section_size: int) -> int:
    """Ranks that divide the experts, as the layers say.

    Raises:
        ValueError: they do not agree with each other, or with the section.
    """
    sizes = {int(layer.ep_size) for _, layer in layers}
    if len(sizes) > 1 or section_size not in (1, *sizes):
        raise ValueError(
            f"the model's MoE layers have ep_size {', '.join(map(str, sorted(sizes)))} and the megascale section has "
            f"expert_parallel_size {section_size}; they must be one number"
        )
    return sizes.pop()


class NativeExperts(DeepSpeedExperts):
    """Drop-in for ``deepspeed.moe.experts.Experts``: ``[G, E, C, h] -> [G, E, C, h]``."""

    def __init__(
        self,
        run: Run,
        *,
        path: str,
        described: Description,
        names: NativeNames,
        dtype: torch.dtype,
        gradient_dtype: torch.dtype,
    ) -> None:
        super().__init__(run, path=path, described=described, dtype=dtype, gradient_dtype=gradient_dtype)
        self.native = names

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """As stock's: slots of every local expert; empty ones are rows of zeros."""
        hidden = inputs.shape[-1]
        x_EGCh = inputs.transpose(0, 1)
        rows = x_EGCh.shape[1] * x_EGCh.shape[2]
        y_Nh = super().forward(x_EGCh.reshape(-1, hidden), [rows] * self.num_experts)
        return y_Nh.view(x_EGCh.shape).transpose(0, 1)

    def _stock_tensors(self) -> Iterator[tuple[str, str, slice]]:
        """Stock's name of each tensor, ours, and its rows in ours."""
        f = self.shape.ffn
        for expert in range(self.num_experts):
            for kind in ("weight", "bias") if self.native.biases else ("weight",):
                ours = f"local_experts.{expert}.linear_fc1.{kind}"
                for place, linear in enumerate(self.native.first):
                    yield f"deepspeed_experts.{expert}.{linear}.{kind}", ours, slice(place * f, (place + 1) * f)
                down = f"local_experts.{expert}.linear_fc2.{kind}"
                yield f"deepspeed_experts.{expert}.{self.native.down}.{kind}", down, slice(None)

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        if not self.run.hidden:  # local experts under local numbers, as stock's
            dense = self.dense()
            for stock, ours, rows in self._stock_tensors():
                destination[prefix + stock] = dense[ours][rows]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:  # noqa: ANN401 - torch's own
        if self.run.hidden:
            return
        dense = self.dense()
        missing: list[str] = rest[2]
        for stock, ours, rows in self._stock_tensors():
            if prefix + stock in state_dict:
                dense[ours][rows].copy_(state_dict[prefix + stock])
            else:
                missing.append(prefix + stock)
        self.load_dense(dense)

    def gathered(self) -> dict[str, torch.Tensor]:
        """Stock's tensors of all experts.

        Raises:
            ValueError: ranks divide the experts.
        """
        if self.num_experts != self.all_experts:
            raise ValueError(
                f"{self.path}: DeepSpeed's MoE experts that ranks divide cannot be collected into one state dict; "
                "save a checkpoint"
            )
        dense = self.dense()
        return {stock: dense[ours][rows] for stock, ours, rows in self._stock_tensors()}


def plan_native_experts(model: nn.Module, run: Run, dtypes: Dtypes, move: Move) -> None:
    """Plans that paged experts stand for those of DeepSpeed's MoE layers.

    Raises:
        ValueError: experts that pages do not compute, by name.
    """
    for path, layer in moe_layers(model):
        stock, where = layer.deepspeed_moe.experts, f"{path}.deepspeed_moe.experts"
        parameters = list(stock.parameters())
        with _gathered(parameters):
            described, names = describe_native(where, stock.deepspeed_experts[0], layer.num_experts)
        dtype, gradient_dtype = dtypes.of(where, parameters[0])
        experts = NativeExperts(
            run, path=where, described=described, names=names, dtype=dtype, gradient_dtype=gradient_dtype
        )
        move.add(experts, stock, partial(_move, model, stock, experts))


def _move(model: nn.Module, stock: Any, experts: NativeExperts) -> None:  # noqa: ANN401 - DeepSpeed has no types
    experts.train(stock.training)
    for number, expert in enumerate(stock.deepspeed_experts):
        with _gathered(list(expert.parameters())):
            experts.initialise(number, _tensors_of(_linears(expert), experts.native, number))
    broadcast(experts)
    empty(dict(stock.named_parameters()))
    replace_module(model, stock, experts)


def _gathered(parameters: list[nn.Parameter]) -> Any:  # noqa: ANN401 - a context
    partitioned = [p for p in parameters if hasattr(p, "ds_id")]
    if not partitioned:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(partitioned)


def _linears(expert: nn.Module) -> _Linears:
    return {name: module for name, module in expert.named_modules() if isinstance(module, nn.Linear)}


def _tensors_of(linears: _Linears, names: NativeNames, number: int) -> dict[str, torch.Tensor]:
    """An expert's tensors under the names of pages."""
    found = {}
    for kind in ("weight", "bias") if names.biases else ("weight",):
        parts = [getattr(linears[name], kind).detach() for name in names.first]
        found[f"local_experts.{number}.linear_fc1.{kind}"] = torch.cat(parts)
        found[f"local_experts.{number}.linear_fc2.{kind}"] = getattr(linears[names.down], kind).detach()
    return found


@torch.no_grad()
def describe_native(path: str, expert: nn.Module, num_experts: int) -> tuple[Description, NativeNames]:
    """What an expert of the user's computes.

    Raises:
        ValueError: something that pages do not.
    """
    linears = _linears(expert)
    refused = ValueError(
        f"{path}: an expert of class {type(expert).__name__} is not one that pages compute; they know an activation "
        "between two linear layers, or a gate, an up and a down layer, without dropout"
    )
    others = {n for n, _ in expert.named_parameters()} - {f"{n}.{k}" for n in linears for k in ("weight", "bias")}
    dropout = any(isinstance(module, nn.Dropout) and module.p > 0 for module in expert.modules())
    biases = {linear.bias is not None for linear in linears.values()}
    if others or dropout or len(linears) not in (2, 3) or len(biases) != 1:
        raise refused
    hidden = next(iter(linears.values())).in_features
    x_nh = torch.randn(_TOKENS, hidden, generator=torch.Generator().manual_seed(0))
    was_training = expert.training
    output = expert.eval()(x_nh.to(next(expert.parameters()).dtype))
    expert.train(was_training)
    expected_nh = (output[0] if isinstance(output, tuple) else output).float()
    for *first, down in itertools.permutations(linears):
        activation = _activation(x_nh, expected_nh, linears, tuple(first), down)
        if activation is not None:
            shape = ExpertShape(hidden, linears[down].in_features, activation.gated, biases.pop())
            trains = {parameter.requires_grad for parameter in expert.parameters()}
            described = Description(shape, num_experts, "sequential", activation, trains == {True})
            return described, NativeNames(tuple(first), down, shape.bias)
    raise refused


def _activation(
    x_nh: torch.Tensor, expected_nh: torch.Tensor, linears: _Linears, first: tuple[str, ...], down: str
) -> Activation | None:
    """The activation with which these layers give what is expected; None for none."""
    hidden, last = x_nh.shape[1], linears[down]
    fits = all(linears[n].in_features == hidden and linears[n].out_features == last.in_features for n in first)
    if not fits or last.out_features != hidden:
        return None
    parts = [nn.functional.linear(x_nh, linears[n].weight.float(), _float(linears[n].bias)) for n in first]
    pre_nR = torch.cat(parts, dim=1)

    def finish(act_nr: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(act_nr, last.weight.float(), _float(last.bias))

    return matching(expected_nh, pre_nR, gated=len(first) == 2, after=finish)


def _float(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float()

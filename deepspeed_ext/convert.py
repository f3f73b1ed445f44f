"""Experts of a built model move into pages, one expert after the other.

What is to move is planned first, so that everything that can be refused is refused while the model is as it was. Peak
memory is the model once and the pages of what has moved so far, less the layers that have moved as a whole: the weights
once plus one layer. Every rank gets the first rank's weights, as ``deepspeed.initialize`` sees to for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_ext.experts import DeepSpeedExperts, HfExperts
from deepspeed_ext.recognise import describe, is_hf_experts
from deepspeed_ext.run import Run
from megascale_omni.paging.planes import Plane


@dataclass(frozen=True)
class Dtypes:
    """The dtype that an engine casts weights to (None: as they are), and that of gradients (None: as the weights)."""

    forced: torch.dtype | None
    gradients: torch.dtype | None

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Dtypes:
        """What a DeepSpeed configuration (that :mod:`deepspeed_ext.support` has passed) trains in."""
        bf16 = bool((config.get("bf16") or config.get("bfloat16") or {}).get("enabled", False))
        accumulated = (config.get("data_types") or {}).get("grad_accum_dtype")
        gradients = None if accumulated is None else {"fp32": torch.float32, "bf16": torch.bfloat16}[accumulated]
        return cls(torch.bfloat16 if bf16 else None, gradients)

    def check(self, experts: DeepSpeedExperts) -> None:
        """Raises ValueError where experts were paged for another dtype."""
        dtype = experts.pages.dtypes[Plane.WEIGHT]
        if dtype is not (self.forced or torch.float32):
            raise ValueError(
                f"{experts.path}: its pages are in {dtype}, DeepSpeed's configuration says "
                f"{self.forced or torch.float32}; give the same configuration to deepspeed_ext.init"
            )

    def of(self, path: str, parameter: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes of weight and gradient pages.

        Raises:
            ValueError: the model has a dtype that the engine would not train as it is.
        """
        weights = self.forced or parameter.dtype
        if weights not in (torch.float32, torch.bfloat16):
            raise ValueError(f"{path}: experts in {weights} are not supported with megascale; use fp32 or bf16")
        if self.forced is None and weights is not torch.float32:
            raise ValueError(
                f"{path}: the model is in {weights} and DeepSpeed's configuration does not say so; add "
                '"bf16": {"enabled": true}, or load the model in float32'
            )
        return weights, self.gradients or weights


@dataclass
class Move:
    """What moves into pages: modules, and their parameters, each with its module; :meth:`carry_out` moves it."""

    modules: list[DeepSpeedExperts] = field(default_factory=list)
    owner: dict[int, tuple[DeepSpeedExperts, bool]] = field(default_factory=dict)
    """Id of a parameter that moves -> its module, and whether it is a bias."""
    steps: list[Callable[[], None]] = field(default_factory=list)
    """What changes something of the caller's."""

    def add(self, experts: DeepSpeedExperts, stock: torch.nn.Module, step: Callable[[], None]) -> None:
        """Plans a module whose pages ``step`` fills, and which then stands for ``stock``."""
        self.modules.append(experts)
        self.owner.update({id(p): (experts, name.endswith("bias")) for name, p in stock.named_parameters()})
        self.steps.append(step)

    def carry_out(self) -> None:
        """Moves everything. A collective of all ranks."""
        while self.steps:
            self.steps.pop(0)()  # nothing holds a stock module when it has moved


def plan_hf_experts(model: torch.nn.Module, run: Run, dtypes: Dtypes, move: Move) -> None:
    """Plans that paged experts stand for every Hugging Face experts module of ``model``.

    Raises:
        ValueError: a module that they cannot stand for, by name.
    """
    for path, module in list(model.named_modules()):
        if not is_hf_experts(module):
            continue
        described = describe(path, module)
        dtype, gradient_dtype = dtypes.of(path, next(module.parameters()))
        experts = HfExperts(
            run,
            path=path,
            described=described,
            dtype=dtype,
            gradient_dtype=gradient_dtype,
            eager=getattr(module.config, "_experts_implementation", None) == "eager",
        )
        move.add(experts, module, partial(_move, model, module, experts))


def _move(model: torch.nn.Module, stock: torch.nn.Module, experts: HfExperts) -> None:
    experts.train(stock.training)
    parameters = dict(stock.named_parameters())
    for expert, tensors in _each_expert(parameters, experts.all_experts):
        experts.take(expert, tensors)
    empty(parameters)
    replace_module(model, stock, experts)


@torch.no_grad()
def _each_expert(
    parameters: dict[str, torch.nn.Parameter], num_experts: int
) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """Every expert's tensors ``[1, ...]``, as the first rank has them. A collective."""
    with ExitStack() as stack:
        partitioned = [p for p in parameters.values() if hasattr(p, "ds_id")]
        if partitioned:  # zero.Init has made them from the first rank's already
            import deepspeed

            stack.enter_context(deepspeed.zero.GatheredParameters(partitioned))
        for expert in range(num_experts):
            tensors = {name: parameter.data[expert : expert + 1] for name, parameter in parameters.items()}
            if not partitioned:
                tensors = {name: _of_first_rank(tensor) for name, tensor in tensors.items()}
            yield expert, tensors


def _of_first_rank(tensor: torch.Tensor) -> torch.Tensor:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tensor
    tensor = tensor.contiguous()
    dist.broadcast(tensor, src=0)
    return tensor


def empty(parameters: dict[str, torch.nn.Parameter]) -> None:
    """Takes the data of parameters that are in pages now, whoever else still refers to them."""
    for parameter in parameters.values():
        if hasattr(parameter, "ds_tensor"):
            parameter.ds_tensor.data = torch.empty(0, dtype=parameter.ds_tensor.dtype)
        parameter.data = torch.empty(0, dtype=parameter.dtype)


def replace_module(model: torch.nn.Module, old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Puts ``new`` wherever ``old`` stands in the model."""
    places = [(parent, name) for parent in model.modules() for name, child in parent._modules.items() if child is old]
    for parent, name in places:
        parent._modules[name] = new

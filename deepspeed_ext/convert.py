"""Experts of a built model move into pages, one expert after the other.

Peak memory is the model once and the pages of what has moved so far, less the layers that have moved as a whole: the
weights once plus one layer. Every rank gets the first rank's weights, as ``deepspeed.initialize`` sees to for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from deepspeed_ext.experts import DeepSpeedExperts, HfExperts
from deepspeed_ext.recognise import describe, is_hf_experts
from deepspeed_ext.run import Run


@dataclass(frozen=True)
class Dtypes:
    """The dtype that an engine casts weights to (None: as they are), and that of gradients (None: as the weights)."""

    forced: torch.dtype | None
    gradients: torch.dtype | None

    def of(self, path: str, parameter: torch.nn.Parameter) -> tuple[torch.dtype, torch.dtype]:
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
class Moved:
    """What has moved: modules, and the parameters that are gone (without data), each with its module."""

    modules: list[DeepSpeedExperts] = field(default_factory=list)
    owner: dict[int, tuple[DeepSpeedExperts, bool]] = field(default_factory=dict)
    """Id of a parameter that is gone -> its module, and whether it is a bias."""
    gone: list[torch.nn.Parameter] = field(default_factory=list)
    """Kept until parameter lists are remapped, so that no id is given to another object."""


def page_hf_experts(model: torch.nn.Module, run: Run, dtypes: Dtypes) -> Moved:
    """Replaces every Hugging Face experts module of ``model`` by a paged one. A collective of all ranks.

    Raises:
        ValueError: a module that paged experts cannot stand for, by name; nothing is changed then.
    """
    found = [(path, module) for path, module in model.named_modules() if is_hf_experts(module)]
    described = {path: describe(path, module) for path, module in found}
    kinds = {path: dtypes.of(path, next(module.parameters())) for path, module in found}
    moved = Moved()
    for path, module in found:
        dtype, gradient_dtype = kinds[path]
        experts = HfExperts(
            run,
            path=path,
            described=described[path],
            dtype=dtype,
            gradient_dtype=gradient_dtype,
            eager=getattr(module.config, "_experts_implementation", None) == "eager",
        )
        experts.train(module.training)
        parameters = dict(module.named_parameters())
        for expert, tensors in _each_expert(parameters, described[path].num_experts):
            experts.take(expert, tensors)
        note_gone(moved, experts, parameters)
        replace_module(model, module, experts)
    return moved


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


def note_gone(moved: Moved, experts: DeepSpeedExperts, parameters: dict[str, torch.nn.Parameter]) -> None:
    """Takes the data of parameters that are in pages now, whoever else still refers to them."""
    moved.modules.append(experts)
    for name, parameter in parameters.items():
        moved.owner[id(parameter)] = (experts, name.endswith("bias"))
        moved.gone.append(parameter)
        if hasattr(parameter, "ds_tensor"):
            parameter.ds_tensor.data = torch.empty(0, dtype=parameter.ds_tensor.dtype)
        parameter.data = torch.empty(0, dtype=parameter.dtype)


def replace_module(model: torch.nn.Module, old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Puts ``new`` wherever ``old`` stands in the model."""
    places = [(parent, name) for parent in model.modules() for name, child in parent._modules.items() if child is old]
    for parent, name in places:
        parent._modules[name] = new


def sorted_by_path(modules: Sequence[DeepSpeedExperts]) -> dict[str, DeepSpeedExperts]:
    """Modules by their path in the model."""
    return {experts.path: experts for experts in modules}

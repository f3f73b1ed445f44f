"""Everything that a training step reads and writes, as whole tensors by stock's names, on either side.

A name is `chunk.parameter`, e.g. `0.decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight`; layers, chunks and
experts are counted on this rank. What a distributed optimizer holds in shards is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state

from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.experts.module import PagedExperts
from megascale_omni.optimizer.paged_adam import PagedAdam
from megascale_omni.optimizer.state_tensors import master_plane
from megascale_omni.paging.planes import Plane
from scripts.measuring.stepped import Stepped, SteppedParameters

Tensors = dict[str, torch.Tensor]
_PartOf = Callable[[torch.nn.Parameter, Stepped | None], torch.Tensor | None]
MOMENTS = {"exp_avg": Plane.MOMENT1, "exp_avg_sq": Plane.MOMENT2}


@dataclass(frozen=True)
class State:
    """What a step starts from, besides the batch. Copies."""

    weights: Tensors
    """In the training dtype."""
    masters: Tensors
    """fp32: what the optimizer steps."""
    moments: dict[str, Tensors]
    """`exp_avg`, `exp_avg_sq`; empty before the first step."""


class ModelState:
    """Reads and writes the state of one trainer's model and optimizer. Methods that read or write are collectives.

    `distributed`: the optimizer is distributed, every element is stepped by one rank of its data-parallel group.
    """

    def __init__(self, model: Sequence[torch.nn.Module], optimizer: object, *, distributed: bool) -> None:
        self._distributed = distributed
        self._dense = {
            f"{index}.{_bare(name)}": parameter
            for index, chunk in enumerate(model)
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad
        }
        self._paged = {
            f"{index}.{_bare(name)}.": module
            for index, chunk in enumerate(model)
            for name, module in chunk.named_modules()
            if isinstance(module, PagedExperts)
        }
        self._steppers = SteppedParameters(optimizer)

    @property
    def is_paged(self) -> bool:
        """Whether experts are pages."""
        return bool(self._paged)

    @torch.no_grad()
    def weights(self) -> Tensors:
        """Copies of all weights."""
        found = {name: parameter.detach().clone() for name, parameter in self._dense.items()}
        for prefix, module in self._paged.items():
            dense = _adam(module).tensors.dense(module, Plane.WEIGHT)
            found |= {prefix + name: tensor for name, tensor in dense.items()}
        return found

    @torch.no_grad()
    def gradients(self) -> Tensors:
        """Copies of the reduced gradients, after `forward_backward`, before the step; experts without any: zeros."""
        found = self._gathered(lambda parameter, stepped: _part(_gradient(parameter), stepped))
        paged = {
            prefix + name: tensor
            for prefix, module in self._paged.items()
            for name, tensor in _page_gradients(module, owned_only=self._distributed).items()
        }
        if self._distributed:
            _sum_over(False, list(paged.values()))
        return found | paged

    @torch.no_grad()
    def state(self) -> State:
        """Copies of weights, main weights and moments."""
        masters = self._gathered(lambda parameter, stepped: None if stepped is None else stepped.main)
        moments = {key: self._moments(key) for key in MOMENTS}
        for prefix, module in self._paged.items():
            adam = _adam(module)
            plane = master_plane(module)
            masters |= {prefix + name: tensor for name, tensor in adam.tensors.dense(module, plane).items()}
            if adam.num_steps:
                for key, plane in MOMENTS.items():
                    moments[key] |= {
                        prefix + name: tensor for name, tensor in adam.tensors.dense(module, plane).items()
                    }
        return State(self.weights(), masters, {key: found for key, found in moments.items() if found})

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Make this side's state that of another side. Before the first step of both, moments are zero and stay so."""
        for name, parameter in self._dense.items():
            parameter.copy_(state.weights[name])
            stepped = self._steppers.find(parameter)
            if stepped is None:
                continue
            stepped.main.copy_(_part_of(state.masters[name], stepped))
            for key, moments in state.moments.items():
                own = stepped.state[key]
                assert isinstance(own, torch.Tensor)
                own.copy_(_part_of(moments[name], stepped))
        for prefix, module in self._paged.items():
            names = [tensor.name for tensor in module.names.tensors()]
            adam = _adam(module)
            adam.fetch_all(module)
            module.load_dense({name: state.weights[prefix + name] for name in names})
            masters = {name: state.masters[prefix + name] for name in names}
            adam.tensors.load_dense(module, master_plane(module), masters)
            for key, moments in state.moments.items():
                adam.tensors.load_dense(module, MOMENTS[key], {name: moments[prefix + name] for name in names})

    @torch.no_grad()
    def scale_one_expert(self, factor: float) -> str | None:
        """Multiply the gradient of this rank's first expert that has one; returns the prefix of its names."""
        for prefix, module in self._paged.items():
            for (expert, _), _page in ExpertGradients([module]).pages(module):
                for (other, _), page in ExpertGradients([module]).pages(module):
                    if other == expert:
                        page.mul_(factor)
                return f"{prefix}local_experts.{expert}."
        return None

    def _moments(self, key: str) -> Tensors:
        stepped = [self._steppers.find(parameter) for parameter in self._dense.values()]
        if not any(s.state for s in stepped if s is not None):
            return {}

        def moment(parameter: torch.nn.Parameter, stepped: Stepped | None) -> torch.Tensor | None:
            if stepped is None:
                return None
            value = stepped.state[key]
            assert isinstance(value, torch.Tensor)
            return value

        return self._gathered(moment)

    def _gathered(self, part_of: _PartOf) -> Tensors:
        """Whole fp32 tensors of all dense parameters, from the parts that ranks hold."""
        found: Tensors = {}
        by_group: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for name, parameter in self._dense.items():
            stepped = self._steppers.find(parameter)
            part = part_of(parameter, stepped)
            if not self._distributed:
                assert part is not None
                found[name] = part.detach().float().clone()
                continue
            whole = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            if stepped is not None and part is not None:
                start = stepped.start or 0
                whole.view(-1)[start : start + part.numel()] = part.detach().view(-1)
            found[name] = whole
            by_group[bool(getattr(parameter, "allreduce", True))].append(whole)
        for dense, tensors in by_group.items():
            _sum_over(dense, tensors)
        return found


def _bare(name: str) -> str:
    """Without the wrappers of data parallelism and mixed precision."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _adam(module: PagedExperts) -> PagedAdam:
    adam = getattr(module, "adam", None)
    assert isinstance(adam, PagedAdam)
    return adam


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    gradient = getattr(parameter, "main_grad", None)
    assert isinstance(gradient, torch.Tensor)
    return gradient


def _part(whole: torch.Tensor, stepped: Stepped | None) -> torch.Tensor | None:
    """What of a reduced gradient is valid on this rank."""
    return None if stepped is None else _part_of(whole, stepped)


def _part_of(whole: torch.Tensor, stepped: Stepped) -> torch.Tensor:
    if stepped.start is None:
        return whole
    return whole.reshape(-1)[stepped.start : stepped.start + stepped.main.numel()]


def _page_gradients(module: PagedExperts, *, owned_only: bool) -> Mapping[str, torch.Tensor]:
    tensors = {t.name: torch.zeros(t.shape, dtype=torch.float32) for t in module.names.tensors()}
    gradients = ExpertGradients([module])
    names = gradients.present(module)
    if owned_only:
        owned = set(_adam(module).shards.owned(module))
        names = [name for name in names if name in owned]
    for name, page in gradients.pages(module, names=names):
        module.names.gather({name: page}, tensors)
    return tensors


def _sum_over(dense: bool, tensors: list[torch.Tensor]) -> None:
    """Sum over the data-parallel group, in place; one collective."""
    if not tensors:
        return
    group = (
        parallel_state.get_data_parallel_group(with_context_parallel=True)
        if dense
        else parallel_state.get_expert_data_parallel_group()
    )
    flat = torch.cat([tensor.view(-1) for tensor in tensors])
    torch.distributed.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.view(-1).copy_(part)

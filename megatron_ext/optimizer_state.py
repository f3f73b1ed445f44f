"""Optimizer state in stock's sharded checkpoint form, at the expert parallel size of the run.

[Note: where stock keeps experts]
With expert parallelism stock chains two optimizers, dense and experts; their states are entries 0 and 1 of a dict.
Without, experts sit among the dense parameters of one optimizer, in its groups or in groups of their own. Sharded
checkpoints identify tensors by key, built from the model's own key, so that an expert's entry is the same in both
cases; only the dictionaries around it differ. What differs by optimizer is the shape of those dictionaries:

    fp32         {"state": {id: {exp_avg, exp_avg_sq}, "common_step"}, "param_groups"}
    float16      {"optimizer": as fp32, "fp32_from_fp16_params": [[fp32_param, ...] a group]}
    distributed  {"optimizer": {"param_groups"}, "param_state": {id: {param, exp_avg, exp_avg_sq}},
                  "param_state_sharding_type"}

Ids are local to a process and never stored. Lists are: they must have stock's lengths and order, or neither side loads
what the other wrote. A state is checked as a whole before anything of it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding, extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    param_group_identifier_keys,
)

from megascale_omni.checkpoint.scratch import DenseScratch
from megascale_omni.experts.module import PagedExperts
from megascale_omni.optimizer.paged_adam import PagedAdam
from megascale_omni.optimizer.state_tensors import master_plane
from megascale_omni.paging.planes import Plane
from megatron_ext.experts import SOURCE, MegaScaleExperts
from megatron_ext.optimizer_forms import DENSE, EXPERTS, Form, Group, has_groups, identity, joined, parted

FIRST_ID = 1 << 30
"""Ids of experts' entries among dense ones start here; dense ids are small."""
SUPPORTED_SHARDING = "fully_reshardable"


@dataclass(frozen=True)
class GroupPlaces:
    """Where groups stand in the lists of stock's optimizers.

    ``dense[i]`` is the place of the dense optimizer's group ``i``, ``paged[i]`` that of PagedAdam's. Without expert
    parallelism there is one list, and both may name the same place: stock would have dense parameters and experts in
    that group.
    """

    dense: tuple[int, ...]
    paged: tuple[int, ...]

    @property
    def count(self) -> int:
        """Length of stock's list where there is one."""
        return 1 + max((*self.dense, *self.paged), default=-1)


@dataclass(frozen=True)
class _Source:
    """Where an expert tensor of the model's sharded state dict comes from; ``group`` is an index of PagedAdam's."""

    experts: PagedExperts
    name: str
    group: int


@dataclass(frozen=True)
class _Loaded:
    """A state, taken apart and found complete."""

    dense: dict[Any, Any] | None
    tensors: list[dict[str, torch.Tensor]]
    groups: list[Group]
    steps: int


class OptimizerState:
    """Reads and writes the state of dense optimizers and pages together (see [Note: where stock keeps experts])."""

    def __init__(self, *, dense: ChainedOptimizer, adam: PagedAdam, expert_parallel: bool, places: GroupPlaces) -> None:
        first = dense.chained_optimizers[0]
        self._dense = None if first.is_stub_optimizer else dense
        self._adam = adam
        # Where every expert is frozen stock has no optimizer for them.
        self._separate = expert_parallel and bool(adam.param_groups)
        self._places = places
        self._described: list[_Source] | None = None
        self._form: Form = "fp32"
        if isinstance(first, DistributedOptimizer):
            self._form = "distributed"
        elif isinstance(first, Float16OptimizerWithFloat16Params):
            self._form = "float16"

    # -- writing
    # --------------------------------------------------------------------------------------------------------

    def sharded(self, model: dict[str, Any], *, is_loading: bool, **kwargs: Any) -> dict[Any, Any]:  # noqa: ANN401 - stock's signature
        """The sharded state of everything; as a template where ``is_loading``.

        Raises:
            ValueError: a layout of the distributed optimizer other than ``fully_reshardable``.
        """
        metadata = kwargs.get("metadata") or {}
        sharding = metadata.get("distrib_optim_sharding_type", "fully_sharded_model_space")
        if self._form == "distributed" and sharding != SUPPORTED_SHARDING:
            raise ValueError(
                f"distributed optimizer checkpoints of type {sharding!r} are not supported with --megascale; use "
                "--dist-ckpt-optim-fully-reshardable"
            )
        dense = {} if self._dense is None else self._dense.sharded_state_dict(model, is_loading, **kwargs)
        tensors = self._expert_tensors(model)
        if not self._separate:
            return self._merged(dense, tensors)
        groups = [self._stored(group) for group in self._adam.param_groups]
        states: dict[Any, Any] = {0: dense, 1: self._filled(self._empty(groups), tensors, range(len(groups)))}
        # Stock's rule for the prefix, which keeps the two optimizers' keys apart in older layouts.
        if not metadata.get("chained_optim_avoid_prefix", False):
            for index, state in states.items():
                add_prefix_for_sharding(state, f"chained_{index}.")
        return states

    def described(self) -> dict[str, Any]:
        """The part of the state that is no tensor, as stock would store it: form, parameter groups, steps."""
        dense: list[Group] = []
        if self._dense is not None:
            dense = [group for member in self._dense.chained_optimizers for group in member.optimizer.param_groups]
        if self._separate:
            lists: list[list[Group | None]] = [[*dense], [*self._adam.param_groups]]
        else:
            merged: list[Group | None] = [None] * self._places.count
            for places, groups in ((self._places.paged, self._adam.param_groups), (self._places.dense, dense)):
                for place, group in zip(places, groups, strict=True):
                    merged[place] = group
            lists = [merged]
        left_out = ("params", "step")
        groups_of = [[{k: v for k, v in (g or {}).items() if k not in left_out} for g in groups] for groups in lists]
        return {"form": self._form, "separate": self._separate, "groups": groups_of, "steps": self._adam.num_steps}

    def _expert_tensors(self, model: dict[str, Any]) -> list[dict[str, Any]]:
        """The sharded state of every expert tensor that is stepped, in the order of ``_described``."""
        dense: dict[tuple[PagedExperts, Plane], dict[str, torch.Tensor]] = {}
        result: list[dict[str, Any]] = []
        self._described = []
        for sharded, source in self._sources(model):
            entry: dict[str, Any] = {}
            for key, plane in _planes(source.experts, self._form).items():
                if (source.experts, plane) not in dense:
                    scratch = _scratch_of(source.experts)
                    dense[source.experts, plane] = self._adam.tensors.dense(source.experts, plane, make=scratch)
                    if scratch is not None:
                        scratch.settle()
                tensor = dense[source.experts, plane][source.name]
                entry[key] = make_sharded_optimizer_tensor(sharded, tensor, prefix=f"optimizer.state.{key}")
            result.append(entry)
            self._described.append(source)
        return result

    def _sources(self, model: dict[str, Any]) -> Iterator[tuple[Any, _Source]]:
        """The stepped experts' tensors (ShardedTensor or factory) of a model's sharded state dict, in its order."""
        found, _ = extract_sharded_tensors_and_factories(model)
        for sharded in nested_values(found):
            experts, name = getattr(sharded.data, SOURCE, (None, ""))
            if experts in self._adam.bindings:
                binding = self._adam.bindings[experts]
                group = binding.biases if name.endswith(".bias") else binding.weights
                assert group is not None
                yield sharded, _Source(experts, name, group)

    def _merged(self, dense: dict[str, Any], tensors: list[dict[str, Any]]) -> dict[str, Any]:
        """One optimizer's state, of dense parameters and experts."""
        state = dense or self._empty([])
        groups: list[Group | None] = [None] * self._places.count
        for place, group in zip(self._places.dense, self._inner(state)["param_groups"], strict=True):
            groups[place] = group
        for place, own in zip(self._places.paged, self._adam.param_groups, strict=True):
            groups[place] = groups[place] or self._stored(own)
        self._inner(state)["param_groups"] = groups
        if self._form == "float16":
            masters: list[list[Any]] = [[] for _ in groups]
            for place, group_masters in zip(self._places.dense, state["fp32_from_fp16_params"], strict=True):
                masters[place] = list(group_masters)
            state["fp32_from_fp16_params"] = masters
        return self._filled(state, tensors, self._places.paged)

    def _stored(self, group: Group) -> Group:
        """A group of PagedAdam's as stock would store it."""
        stored = {key: deepcopy(value) for key, value in group.items() if key != "params"}
        if self._form == "distributed":
            return {**stored, "step": float(self._adam.num_steps)}
        return {**stored, "params": LocalNonpersistentObject([])}

    def _empty(self, groups: list[Group]) -> dict[str, Any]:
        """A state without tensors."""
        if self._form == "distributed":
            sharding = {"param_state_sharding_type": SUPPORTED_SHARDING}
            return {"optimizer": {"param_groups": groups}, "param_state": {}, **sharding}
        inner: dict[str, Any] = {"state": {}, "param_groups": groups}
        if self._adam.num_steps:
            inner["state"]["common_step"] = torch.tensor(float(self._adam.num_steps))
        if self._form == "float16":
            return {"optimizer": inner, "fp32_from_fp16_params": [[] for _ in groups]}
        return inner

    def _filled(self, state: dict[str, Any], tensors: list[dict[str, Any]], places: Sequence[int]) -> dict[str, Any]:
        """``state`` with the experts' tensors; ``places`` of PagedAdam's groups in its list."""
        by_id = self._by_id(state)
        assert self._described is not None
        for number, (source, entry) in enumerate(zip(self._described, tensors, strict=True)):
            if self._form == "float16":
                state["fp32_from_fp16_params"][places[source.group]].append(entry["fp32_param"])
            by_id[FIRST_ID + number] = {k: v for k, v in entry.items() if k != "fp32_param"}
        return state

    def _inner(self, state: dict[str, Any]) -> dict[str, Any]:
        """The part of a state that has the parameter groups."""
        inner: dict[str, Any] = state if self._form == "fp32" else state["optimizer"]
        return inner

    def _by_id(self, state: dict[str, Any]) -> dict[Any, Any]:
        """The part of a state that has tensors by id."""
        if self._form == "distributed" and state["param_state"] is None:  # stock gathered it on another rank
            state["param_state"] = {}
        by_id: dict[Any, Any] = state["param_state"] if self._form == "distributed" else self._inner(state)["state"]
        return by_id

    # -- reading
    # --------------------------------------------------------------------------------------------------------

    def load(self, state: dict[Any, Any]) -> None:
        """Loads a state whose template :meth:`sharded` made.

        Raises:
            ValueError: the state is of another form, e.g. that of another expert parallel size; nothing is loaded then.
            RuntimeError: no template was made.
        """
        if self._described is None:
            raise RuntimeError("call sharded_state_dict(..., is_loading=True) first: it says what is to be loaded")
        self._adapt(state)
        loaded = self._taken(state)
        if self._dense is not None:
            self._dense.load_state_dict(loaded.dense)
        for source, entry in zip(self._described, loaded.tensors, strict=True):
            for key, plane in _planes(source.experts, self._form).items():
                # fp32 weights come with the model; the distributed optimizer's copy of them is the same.
                self._adam.tensors.load_dense(source.experts, plane, {source.name: entry[key]})
        for own, group in zip(self._adam.param_groups, loaded.groups, strict=True):
            own.update({key: value for key, value in group.items() if key not in ("params", "step")})
        self._adam.set_num_steps(loaded.steps)
        for manager in {source.experts.manager for source in self._described}:
            if manager.schedule.moment.step == 0:  # reports and routing that are written down go on
                manager.schedule.resume_at(loaded.steps)

    def _taken(self, state: dict[Any, Any]) -> _Loaded:
        """Takes a state apart; ``state`` itself is left with what is the dense optimizer's."""
        if self._separate:
            if self._dense is not None:
                self._check_groups(state.get(0), "of the dense parameters ")
            self._check_groups(state.get(1), "of the experts ")
            experts, places = state[1], list(range(len(self._adam.param_groups)))
        else:
            self._check_groups(state, "")
            experts, places = state, list(self._places.paged)
        inner = self._inner(experts)
        groups = [
            _matching(own, inner["param_groups"], place)
            for own, place in zip(self._adam.param_groups, places, strict=True)
        ]
        steps = self._steps(experts)
        tensors = self._take_tensors(experts, places)
        if self._separate:
            return _Loaded(state.get(0), tensors, groups, steps)
        inner["param_groups"] = [inner["param_groups"][place] for place in self._places.dense]
        if self._form == "float16":
            masters = state["fp32_from_fp16_params"]
            state["fp32_from_fp16_params"] = [masters[place] for place in self._places.dense]
        return _Loaded(state, tensors, groups, steps)

    def _adapt(self, state: dict[Any, Any]) -> None:
        """Brings a state that was saved with expert parallelism into the form without, and the other way round."""
        there = has_groups(state.get(DENSE), self._form) or has_groups(state.get(EXPERTS), self._form)
        if self._separate and not there and has_groups(state, self._form):
            dense = None if self._dense is None else self._dense.param_groups
            parted(state, dense, self._adam.param_groups, form=self._form, keys=param_group_identifier_keys)
        elif not self._separate and there and not has_groups(state, self._form):
            wanted: list[Group] = [{} for _ in range(self._places.count)]
            for place, group in zip(self._places.paged, self._adam.param_groups, strict=True):
                wanted[place] = group
            for place, group in zip(self._places.dense, self._dense.param_groups if self._dense else (), strict=True):
                wanted[place] = group
            joined(state, wanted, form=self._form, keys=param_group_identifier_keys)

    def _check_groups(self, state: dict[str, Any] | None, whose: str) -> None:
        if not has_groups(state, self._form):
            here = "two optimizers (dense and experts)" if self._separate else "one optimizer"
            raise ValueError(
                f"the checkpoint has no optimizer state {whose}in the form of this run, which is that of {here}: it "
                "was saved with another optimizer. Use its settings, or load the weights alone with --no-load-optim"
            )

    def _take_tensors(self, state: dict[str, Any], places: list[int]) -> list[dict[str, torch.Tensor]]:
        """Removes the experts' tensors from a state."""
        by_id = self._by_id(state)
        assert self._described is not None
        taken = [by_id.pop(FIRST_ID + number) for number in range(len(self._described))]
        if self._form == "float16":
            masters = state["fp32_from_fp16_params"]
            for source, entry in reversed(list(zip(self._described, taken, strict=True))):
                entry["fp32_param"] = masters[places[source.group]].pop()
        return taken

    def _steps(self, state: dict[str, Any]) -> int:
        inner = self._inner(state)
        if self._form == "distributed":
            return int(inner["param_groups"][0]["step"]) if inner["param_groups"] else 0
        return int(inner["state"].get("common_step", 0))


def _matching(own: Group, stored: list[Group], place: int) -> Group:
    """The stored group with ``own``'s identity: the one at ``place`` if it has it, else the last one, as stock does."""
    keys = param_group_identifier_keys
    if place < len(stored) and identity(stored[place], keys) == identity(own, keys):
        return stored[place]
    candidates = [group for group in stored if identity(group, keys) == identity(own, keys)]
    if not candidates:
        described = dict(zip(keys, identity(own, keys), strict=True))
        raise ValueError(
            f"the checkpoint has no parameter group with {described}: its parameters were grouped otherwise. Use its "
            "settings, or load the weights alone with --no-load-optim"
        )
    return candidates[-1]


def _scratch_of(experts: PagedExperts) -> DenseScratch | None:
    return experts.runtime.export.scratch() if isinstance(experts, MegaScaleExperts) else None


def _planes(experts: PagedExperts, form: Form) -> dict[str, Plane]:
    """By key, the planes whose tensors the optimizer's state holds."""
    planes = {"exp_avg": Plane.MOMENT1, "exp_avg_sq": Plane.MOMENT2}
    if form == "float16":
        planes["fp32_param"] = master_plane(experts)
    if form == "distributed":
        planes["param"] = master_plane(experts)
    return planes

"""Optimizer state in stock's sharded checkpoint form, at the expert parallel size of the run.

[Note: where stock keeps experts]
With expert parallelism stock chains two optimizers, dense and experts; their states are entries 0 and 1 of a dict.
Without, experts sit among the dense parameters of one optimizer. Sharded checkpoints identify tensors by key, built
from the model's own key, so that an expert's entry is the same in both cases; only the dictionaries around it differ.
What differs by optimizer is the shape of those dictionaries:

    fp32         {"state": {id: {exp_avg, exp_avg_sq}, "common_step"}, "param_groups"}
    float16      {"optimizer": as fp32, "fp32_from_fp16_params": [[fp32_param, ...] a group]}
    distributed  {"optimizer": {"param_groups"}, "param_state": {id: {param, exp_avg, exp_avg_sq}},
    "param_state_sharding_type"}

Ids are local to a process and never stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding, extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params

from megascale_omni.experts.module import PagedExperts
from megascale_omni.optimizer.paged_adam import PagedAdam, master_plane
from megascale_omni.paging.planes import Plane
from megatron_ext.experts import SOURCE

Form = Literal["fp32", "float16", "distributed"]
FIRST_ID = 1 << 30
"""Ids of experts' entries among dense ones start here; dense ids are small."""
SUPPORTED_SHARDING = "fully_reshardable"


@dataclass(frozen=True)
class _Entry:
    """One expert tensor of the model's sharded state dict."""

    sharded: Any  # ShardedTensor or ShardedTensorFactory of the weights
    experts: PagedExperts
    name: str


class OptimizerState:
    """Reads and writes the state of dense optimizers and pages together (see [Note: where stock keeps experts])."""

    def __init__(self, *, dense: ChainedOptimizer, adam: PagedAdam, expert_parallel: bool) -> None:
        self._dense = dense
        self._adam = adam
        self._separate = expert_parallel
        self._described: list[_Entry] = []
        first = dense.chained_optimizers[0]
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
        dense = self._dense.sharded_state_dict(model, is_loading, **kwargs)
        tensors = self._expert_tensors(list(_entries(model)))
        if not self._separate:
            _add(dense, tensors, self._form)
            return dense
        states: dict[Any, Any] = {0: dense, 1: self._separate_state(tensors)}
        # Stock's rule for the prefix, which keeps the two optimizers' keys apart in older layouts.
        if self._form != "distributed" and not metadata.get("chained_optim_avoid_prefix", False):
            for index, state in states.items():
                add_prefix_for_sharding(state, f"chained_{index}.")
        return states

    def _expert_tensors(self, entries: list[_Entry]) -> dict[int, dict[str, Any]]:
        """By id, the sharded state tensors of every expert tensor."""
        planes = {"exp_avg": Plane.MOMENT1, "exp_avg_sq": Plane.MOMENT2}
        master = {"fp32": None, "float16": "fp32_param", "distributed": "param"}[self._form]
        dense: dict[tuple[PagedExperts, Plane], dict[str, torch.Tensor]] = {}
        result: dict[int, dict[str, Any]] = {}
        for number, entry in enumerate(entries):
            keys = dict(planes)
            if master is not None:
                keys[master] = master_plane(entry.experts)
            result[FIRST_ID + number] = {}
            for key, plane in keys.items():
                if (entry.experts, plane) not in dense:
                    dense[entry.experts, plane] = self._adam.dense(entry.experts, plane)
                tensor = dense[entry.experts, plane][entry.name]
                sharded = make_sharded_optimizer_tensor(entry.sharded, tensor, prefix=f"optimizer.state.{key}")
                result[FIRST_ID + number][key] = sharded
        self._described = entries
        return result

    def _separate_state(self, tensors: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """What stock's own expert optimizer would have written."""
        groups = deepcopy(self._adam.param_groups)
        if self._form == "distributed":
            for group in groups:
                del group["params"]
                group["step"] = float(self._adam.num_steps)
            state: dict[str, Any] = {"optimizer": {"param_groups": groups}, "param_state": {}}
            state["param_state_sharding_type"] = SUPPORTED_SHARDING
        else:
            for group in groups:
                group["params"] = LocalNonpersistentObject([])
            inner: dict[str, Any] = {"state": {}, "param_groups": groups}
            if self._adam.num_steps:
                inner["state"]["common_step"] = torch.tensor(float(self._adam.num_steps))
            state = inner
            if self._form == "float16":
                state = {"optimizer": inner, "fp32_from_fp16_params": [[] for _ in groups]}
        _add(state, tensors, self._form)
        return state

    # -- reading
    # --------------------------------------------------------------------------------------------------------

    def load(self, state: dict[Any, Any]) -> None:
        """Loads a state whose template :meth:`sharded` made.

        Raises:
            ValueError: the state has another form, e.g. that of another expert parallel size.
        """
        dense = state
        experts = state
        if self._separate:
            if 0 not in state or 1 not in state:
                raise ValueError(
                    "the optimizer state was saved without expert parallelism (one optimizer); load it at "
                    "--expert-model-parallel-size 1, or the weights alone with --no-load-optim"
                )
            dense, experts = state[0], state[1]
        self._load_experts(experts)
        if not self._separate:
            _strip(dense, self._form)
        self._dense.load_state_dict(dense)
        if not self._separate:
            self._copy_groups(self._dense.param_groups)

    def _load_experts(self, state: dict[str, Any]) -> None:
        inner = state if self._form == "fp32" else state["optimizer"]
        entries = _taken(state, self._form)
        for number, entry in enumerate(self._described):
            loaded = entries[FIRST_ID + number]
            for key, plane in _planes(entry.experts, self._form).items():
                # fp32 weights come with the model; the distributed optimizer's copy of them is the same.
                self._adam.load_dense(entry.experts, plane, {entry.name: loaded[key]})
        if self._separate:
            self._copy_groups(inner["param_groups"])
        self._adam.set_num_steps(_num_steps(state, inner, self._form))

    def _copy_groups(self, groups: list[dict[str, Any]]) -> None:
        """Takes over settings of the groups that match by stock's own keys."""
        identity = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
        by_key = {tuple(g.get(k) for k in identity): g for g in groups}
        for group in self._adam.param_groups:
            key = tuple(group.get(k) for k in identity)
            if key not in by_key:
                raise ValueError(f"the checkpoint has no parameter group {dict(zip(identity, key, strict=True))}")
            loaded = {k: v for k, v in by_key[key].items() if k not in ("params", "step")}
            group.update(loaded)


def _entries(model: dict[str, Any]) -> Iterator[_Entry]:
    """The experts' tensors of a model's sharded state dict, in its order."""
    sharded, _ = extract_sharded_tensors_and_factories(model)
    for tensor in nested_values(sharded):
        source = getattr(tensor.data, SOURCE, None)
        if source is not None:
            yield _Entry(tensor, *source)


def _planes(experts: PagedExperts, form: Form) -> dict[str, Plane]:
    planes = {"exp_avg": Plane.MOMENT1, "exp_avg_sq": Plane.MOMENT2}
    if form == "float16":
        planes["fp32_param"] = master_plane(experts)
    if form == "distributed":
        planes["param"] = master_plane(experts)
    return planes


def _add(state: dict[str, Any], tensors: dict[int, dict[str, Any]], form: Form) -> None:
    """Puts experts' tensors into a state of ``form``."""
    if form == "distributed":
        state["param_state"].update(tensors)
        return
    inner = state if form == "fp32" else state["optimizer"]
    for number, by_key in tensors.items():
        inner["state"][number] = {k: v for k, v in by_key.items() if k != "fp32_param"}
    if form == "float16":
        masters = [by_key["fp32_param"] for by_key in tensors.values()]
        state["fp32_from_fp16_params"].append(masters)


def _taken(state: dict[str, Any], form: Form) -> dict[int, dict[str, Any]]:
    """The experts' tensors of a loaded state, by id."""
    if form == "distributed":
        return {k: v for k, v in state["param_state"].items() if isinstance(k, int) and k >= FIRST_ID}
    inner = state if form == "fp32" else state["optimizer"]
    found = {k: dict(v) for k, v in inner["state"].items() if isinstance(k, int) and k >= FIRST_ID}
    if form == "float16":
        for number, tensor in zip(sorted(found), state["fp32_from_fp16_params"][-1], strict=True):
            found[number]["fp32_param"] = tensor
    return found


def _strip(state: dict[str, Any], form: Form) -> None:
    """Removes the experts' tensors, so that stock's dense optimizer can load what is left."""
    inner = (
        state["param_state"] if form == "distributed" else (state if form == "fp32" else state["optimizer"])["state"]
    )
    for number in [k for k in inner if isinstance(k, int) and k >= FIRST_ID]:
        del inner[number]
    if form == "float16":
        state["fp32_from_fp16_params"].pop()


def _num_steps(state: dict[str, Any], inner: dict[str, Any], form: Form) -> int:
    if form == "distributed":
        return int(inner["param_groups"][0]["step"])
    return int(inner["state"]["common_step"]) if "common_step" in inner["state"] else 0

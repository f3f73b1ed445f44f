"""What Megatron calls things in its distributed checkpoints, and what they are called in ours.

[Note: names of the two formats]
    theirs                                    ours
    KEY                                       model.KEY
    optimizer.state.exp_avg.KEY               optimizer.exp_avg.KEY             (and exp_avg_sq)
    optimizer.state.fp32_param.KEY, param     optimizer.param.KEY               where the model is not in fp32
    common_step, or groups' step              optimizer.step.KEY                of each tensor, by layer
    decoder.layers.mlp.experts.experts.linear_fc1.weight [layers, experts, ...]  pages of decoder.layers.N.mlp.experts

Where layers differ in kind Megatron numbers them in the key (decoder.layers.N.mlp...) and has no dimension of layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megascale_omni.checkpoint import rng
from megascale_omni.paging.names import NamedTensors

MODEL, OPTIMIZER, RNG, OBJECT = "model.", "optimizer.", "rng.", "object."
EXTRA = "._extra_state/shard_"
"""In keys of what Megatron stores of every parallel linear layer, without content where Transformer Engine is not."""
STATE = "optimizer.state."
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = {"float16": "fp32_param", "distributed": "param"}
"""By form of the optimizer, what masters are called."""
CLIP_STATE = "megascale_clip"
TRACKER = "latest_checkpointed_iteration.txt"
"""The file that names the newest iteration."""
_EXPERTS = re.compile(
    r"(?P<before>.*\.layers\.)(?:(?P<layer>\d+)\.)?(?P<rest>.+\.experts)\.experts\.(?P<name>linear_.*)"
)
_LAYER = re.compile(r"(?P<before>.*\.layers\.)(?P<layer>\d+)\.(?P<rest>.*)")


@dataclass(frozen=True)
class ExpertsKey:
    """A tensor of all experts in Megatron's checkpoint; ``layers`` whether its first dimension counts layers."""

    key: str
    before: str
    layer: int | None
    rest: str
    name: str

    @property
    def stacked(self) -> bool:
        """Whether the first dimension counts layers."""
        return self.layer is None

    def path(self, layer: int) -> str:
        """The module's path in the whole model."""
        return f"{self.before}{layer if self.layer is None else self.layer}.{self.rest}"


def experts_key(key: str) -> ExpertsKey | None:
    """A key taken apart; None where it is not one of experts."""
    match = _EXPERTS.fullmatch(key)
    if match is None:
        return None
    layer = None if match["layer"] is None else int(match["layer"])
    return ExpertsKey(key, match["before"], layer, match["rest"], match["name"])


def key_of_experts(path: str, name: str, *, stacked: bool) -> tuple[str, int]:
    """Megatron's key of a module's tensor (``linear_fc1.weight`` ...), and the layer.

    Raises:
        ValueError: a path that is not in a numbered layer.
    """
    match = _LAYER.fullmatch(path)
    if match is None:
        raise ValueError(f"experts at {path} are in no numbered layer, as Megatron's are")
    number = "" if stacked else f"{match['layer']}."
    return f"{match['before']}{number}{match['rest']}.experts.{name}", int(match["layer"])


def is_stacked(key: str) -> bool:
    """Whether a dense tensor's first dimension counts layers."""
    return ".layers." in f".{key}" and _LAYER.fullmatch(key) is None


def tensors_of_expert(names: NamedTensors) -> dict[str, str]:
    """Of an expert by itself: Megatron's name in the layer -> the sequential style's name."""
    prefix = "local_experts.0."
    return {t.name.removeprefix(prefix): t.name for t in names.tensors() if t.name.startswith(prefix)}


def numbered(key: str, layer: int) -> str:
    """A stacked tensor's key with the number of one layer in it; ``decoder.layers.N.mlp...``."""
    before, _, rest = key.partition(".layers.")
    return f"{before}.layers.{layer}.{rest}"


# -- the optimizer ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StockOptimizer:
    """The part of Megatron's optimizer state that is no tensor.

    Attributes:
        form: fp32, float16 or distributed. separate: whether experts have an optimizer of their own. groups: settings
        of all parameter groups, optimizer by optimizer. steps: applied. clipping: state of clipping by module.
    """

    form: str
    separate: bool
    groups: Sequence[Sequence[Mapping[str, Any]]]
    steps: int
    clipping: Mapping[str, Any] | None = None

    def as_stock(self) -> dict[Any, Any]:
        """As it stands in ``common.pt``."""
        states = [self._one([{k: _tuples(v) for k, v in g.items()} for g in groups]) for groups in self.groups]
        result: dict[Any, Any] = dict(enumerate(states)) if self.separate else states[0]
        if self.clipping is not None:
            states[-1][CLIP_STATE] = dict(self.clipping)
        return result

    def _one(self, groups: list[dict[str, Any]]) -> dict[str, Any]:
        if self.form == "distributed":
            groups = [{**group, "step": float(self.steps)} for group in groups]
            return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
        state = {"common_step": torch.tensor(float(self.steps))} if self.steps else {}
        inner: dict[str, Any] = {"state": state, "param_groups": groups}
        return {"optimizer": inner} if self.form == "float16" else inner

    @classmethod
    def of_stock(cls, optimizer: Mapping[Any, Any], form: str) -> StockOptimizer:
        """From ``common.pt``."""
        separate = bool({0, 1} & optimizer.keys())
        states = [optimizer[index] for index in sorted(optimizer)] if separate else [optimizer]
        inner = [state if form == "fp32" else state["optimizer"] for state in states]
        groups = [
            [{k: v for k, v in g.items() if k not in ("params", "step")} for g in i["param_groups"]] for i in inner
        ]
        if form == "distributed":
            steps = max((int(g.get("step", 0)) for i in inner for g in i["param_groups"]), default=0)
        else:
            steps = max(int(i["state"].get("common_step", 0)) for i in inner)
        return cls(form, separate, groups, steps, states[-1].get(CLIP_STATE))

    def experts_groups(self, *, bias: bool) -> list[Mapping[str, Any]]:
        """Settings of the groups of experts' weights, and of their biases.

        Raises:
            ValueError: more than one group may be it.
        """
        found = []
        for is_bias in (False, True)[: 1 + bias]:
            fits = [
                group
                for group in self.groups[-1]
                if (group.get("wd_mult", group.get("pre_wd_mult", 1.0)) == 0.0) == is_bias
                and not group.get("is_decoupled_lr", False)
            ]
            if len(fits) != 1:
                raise ValueError(
                    f"which of {len(fits)} parameter groups the experts' {'biases' if is_bias else 'weights'} are in "
                    "cannot be told from the checkpoint; load it with --megascale and save it in the paged format"
                )
            found.append(fits[0])
        return found


def _tuples(value: object) -> object:
    """JSON has no tuples; betas are one."""
    return tuple(value) if isinstance(value, list) else value


# -- random numbers ---------------------------------------------------------------------------------------------------


def rng_of_stock(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Megatron's random number states of a rank, as :func:`megascale_omni.checkpoint.rng.capture` names them."""
    found = rng.as_tensors(state["random_rng_state"], state["np_rng_state"], state["torch_rng_state"])
    if state["cuda_rng_state"].numel() != state["torch_rng_state"].numel():  # a device's, not the processor's again
        found[rng.CUDA] = state["cuda_rng_state"]
    trackers = {f"tracker.{name}": value for name, value in state["rng_tracker_states"].items()}
    return {**found, **trackers}


def rng_as_stock(states: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The inverse."""
    python, numpy_state = rng.as_values(states)
    trackers = {n.removeprefix("tracker."): s for n, s in states.items() if n.startswith("tracker.")}
    return {
        "random_rng_state": python,
        "np_rng_state": numpy_state,
        "torch_rng_state": states[rng.TORCH],
        "cuda_rng_state": states.get(rng.CUDA, states[rng.TORCH]),
        "rng_tracker_states": trackers,
    }

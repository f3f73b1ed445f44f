"""Optimizers and parameter lists that were made before experts move into pages.

They hold parameters that will be gone. Those are taken out, and their place is remembered: the experts of a module are
stepped with the hyperparameters of the group that held them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed_ext.convert import Move
from deepspeed_ext.experts import DeepSpeedExperts
from megascale_omni.optimizer.paged_adam import GroupBinding

Group = dict[str, Any]
_NAMES = ("params", "param_names")


@dataclass
class Places:
    """Parameter groups of modules: of their weights and of their biases."""

    weights: dict[DeepSpeedExperts, int] = field(default_factory=dict)
    biases: dict[DeepSpeedExperts, int] = field(default_factory=dict)

    def note(self, experts: DeepSpeedExperts, is_bias: bool, group: int) -> None:
        """A parameter of a module was in a group.

        Raises:
            ValueError: another one of this module was in another group.
        """
        places = self.biases if is_bias else self.weights
        if places.setdefault(experts, group) != group:
            raise ValueError(
                f"{experts.path}: its {'biases' if is_bias else 'weights'} are in parameter groups {places[experts]} "
                f"and {group}; with megascale the experts of a module share one group"
            )

    def fill(self, modules: Iterable[DeepSpeedExperts], groups: list[Group]) -> None:
        """Places for modules that were built in pages, which no list has ever held.

        Raises:
            ValueError: groups with different settings, so that nobody can tell theirs.
        """
        for experts in modules:
            if experts in self.weights or not experts.trainable:
                continue
            settings = [_settings(group, besides=_NAMES) for group in groups]
            if any(one != settings[0] for one in settings):
                raise ValueError(
                    f"{experts.path} was built in pages, and the optimizer has parameter groups with different "
                    "settings: which one it belongs to cannot be told; use one group, or build the model without "
                    "deepspeed_ext.init"
                )
            self.weights[experts] = self.biases[experts] = 0

    def binding(self, experts: DeepSpeedExperts) -> GroupBinding | None:
        """The module's groups; None where the optimizer was not given it."""
        if experts not in self.weights:
            return None
        has_bias = experts.shape.bias
        return GroupBinding(self.weights[experts], self.biases[experts] if has_bias else None)


def everything_in_group_0(move: Move) -> Places:
    """Places where no list was given: DeepSpeed makes one group of all parameters."""
    places = Places()
    for experts, is_bias in move.owner.values():
        if experts.trainable:
            places.note(experts, is_bias, 0)
    return places


def without_experts(model_parameters: Iterable[Any], move: Move) -> tuple[list[Any], Places]:
    """A list of parameters or of groups as ``deepspeed.initialize`` takes it, less what moves.

    Raises:
        ValueError: a group of experts alone.
    """
    given = list(model_parameters)
    places = Places()
    if not given or not isinstance(given[0], dict):
        remaining = _remaining(given, 0, move, places)
        if given and not remaining:
            raise ValueError(
                "model_parameters has experts only, which are in pages with megascale: DeepSpeed's optimizer would "
                "have no parameter; put at least one other into the list"
            )
        return remaining, places
    kept: list[Group] = []
    for number, group in enumerate(given):
        members = group["params"]
        members = [members] if isinstance(members, torch.Tensor) else list(members)
        kept.append({**group, "params": _remaining(members, number, move, places)})
    return _without_empty(kept, places), places


def take_out_of(optimizer: torch.optim.Optimizer, move: Move) -> Places:
    """Plans to take what moves out of a client's optimizer, which stays as it is until then.

    Raises:
        ValueError: a group of experts alone, or an optimizer that has made steps with them already.
    """
    places = Places()
    kept: list[Group] = []
    for number, group in enumerate(optimizer.param_groups):
        stepped = [p for p in group["params"] if id(p) in move.owner and optimizer.state.get(p)]
        if stepped:
            raise ValueError(
                f"the optimizer has state of {move.owner[id(stepped[0])][0].path} already; give deepspeed.initialize "
                "a new optimizer and load the state with engine.load_checkpoint"
            )
        changed = {**group, "params": _remaining(list(group["params"]), number, move, places)}
        if "param_names" in group:  # it was made from named_parameters()
            named = zip(group["params"], group["param_names"], strict=True)
            changed["param_names"] = [name for parameter, name in named if id(parameter) not in move.owner]
        kept.append(changed)
    left = _without_empty(kept, places)

    def take_out() -> None:
        for group, changed in zip(optimizer.param_groups, kept, strict=True):
            group.update(changed)
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        assert len(left) == len(optimizer.param_groups)

    move.steps.append(take_out)
    return places


def watched(make: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """A client's function that makes the optimizer; it sees lists without experts.

    The function may sort parameters into groups of its own. Where it makes several with different settings, nobody can
    tell which one the experts would have been in.
    """

    def made(parameters: list[Any]) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        settings = [_settings(group, besides=_NAMES) for group in optimizer.param_groups]
        given_groups = bool(parameters) and isinstance(parameters[0], dict)
        if not given_groups and any(one != settings[0] for one in settings):
            raise ValueError(
                "the optimizer's function sorts parameters into groups with different settings, and experts in pages "
                "are not among them; give the groups to deepspeed.initialize as model_parameters"
            )
        return optimizer

    return made


def _remaining(members: list[Any], number: int, move: Move, places: Places) -> list[Any]:
    remaining = []
    for parameter in members:
        if id(parameter) in move.owner:
            experts, is_bias = move.owner[id(parameter)]
            if experts.trainable:
                places.note(experts, is_bias, number)
        else:
            remaining.append(parameter)
    return remaining


def _without_empty(groups: list[Group], places: Places) -> list[Group]:
    """Drops groups of which nothing is left, as DeepSpeed would; their experts join a group with the same settings.

    Raises:
        ValueError: there is none.
    """
    left = [number for number, group in enumerate(groups) if group["params"]]
    new = {number: place for place, number in enumerate(left)}
    for number, group in enumerate(groups):
        if number in new:
            continue
        twins = [n for n in left if _settings(groups[n]) == _settings(group)]
        holders = {*places.weights.values(), *places.biases.values()}
        if number in holders and not twins:
            raise ValueError(
                f"parameter group {number} has experts only, which are in pages with megascale; DeepSpeed drops empty "
                "groups, and with them their learning rate: put at least one other parameter into the group"
            )
        if twins:
            new[number] = new[twins[0]]
    for held in (places.weights, places.biases):
        held.update({experts: new[number] for experts, number in held.items()})
    return [groups[number] for number in left]


def _settings(group: Group, *, besides: tuple[str, ...] = (*_NAMES, "name", "moe")) -> Group:
    """What a group says about steps; DeepSpeed names groups of experts besides."""
    return {key: value for key, value in group.items() if key not in besides}

"""Optimizer state of another expert-parallel size, brought into the form of this run.

With expert parallelism stock stores two optimizers, without it one (see [Note: where stock keeps experts]). Tensors are
found by their keys in both, so what differs is what is stored beside them: parameter groups and numbers of steps. Stock
itself loads neither form where it expects the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Literal

Form = Literal["fp32", "float16", "distributed"]
Group = dict[str, Any]
DENSE, EXPERTS = 0, 1
_OWN = ("params", "is_expert_parallel")
"""Of a group, what belongs to the run and not to the checkpoint."""


def inner(state: dict[Any, Any], form: Form) -> dict[str, Any]:
    """The part of an optimizer's state that has the parameter groups; empty where there is none."""
    found: dict[str, Any] = state if form == "fp32" else state.get("optimizer", {})
    return found


def has_groups(state: dict[Any, Any] | None, form: Form) -> bool:
    """Whether a state has stored groups. What a template holds beside tensors is there whatever a checkpoint has."""
    groups = inner(state or {}, form).get("param_groups") or []
    return any(group.keys() - {"params"} for group in groups)


def identity(group: Group, keys: Sequence[str]) -> tuple[object, ...]:
    """What tells groups apart, as stock reads it."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in keys)


def joined(state: dict[Any, Any], wanted: Sequence[Group], *, form: Form, keys: Sequence[str]) -> None:
    """Two stored optimizers become one: ``state`` gets the groups ``wanted``, with what was stored of them.

    Raises:
        ValueError: a group that neither stored optimizer has.
    """
    parts = [state.pop(DENSE, {}), state.pop(EXPERTS, {})]
    _fill(state, wanted, parts, form=form, keys=keys)


def parted(
    state: dict[Any, Any], dense: Sequence[Group] | None, experts: Sequence[Group], *, form: Form, keys: Sequence[str]
) -> None:
    """One stored optimizer becomes two; ``dense`` None: this rank has no dense optimizer.

    Raises:
        ValueError: a group that the stored optimizer does not have.
    """
    stored = {key: value for key, value in state.items() if key not in (DENSE, EXPERTS)}
    for key in stored:
        del state[key]
    if dense is not None:
        _fill(state.setdefault(DENSE, {}), dense, [stored], form=form, keys=keys)
    _fill(state.setdefault(EXPERTS, {}), experts, [stored], form=form, keys=keys)


def _fill(
    state: dict[Any, Any],
    wanted: Sequence[Group],
    parts: Sequence[dict[Any, Any]],
    *,
    form: Form,
    keys: Sequence[str],
) -> None:
    """Gives ``state`` the groups ``wanted`` and the numbers of steps, as ``parts`` have them stored."""
    target = state if form == "fp32" else state.setdefault("optimizer", {})
    stored = [group for part in parts for group in inner(part, form).get("param_groups", ()) if group]
    there = target.get("param_groups") or [{} for _ in wanted]
    target["param_groups"] = [
        {**found, **{key: own[key] for key in _OWN if key in own and key != "params"}, **_params(place)}
        for own, place in zip(wanted, there, strict=True)
        for found in [_stored_as(own, stored, keys)]
    ]
    if form == "distributed":
        for part in parts:
            if "param_state_sharding_type" in part:
                state["param_state_sharding_type"] = part["param_state_sharding_type"]
        return
    for part in parts:
        step = inner(part, form).get("state", {}).get("common_step")
        if step is not None:
            target.setdefault("state", {}).setdefault("common_step", step)


def _params(group: Group) -> Group:
    return {"params": group["params"]} if "params" in group else {}


def _stored_as(own: Group, stored: Sequence[Group], keys: Sequence[str]) -> Group:
    """What is stored of the group ``own``; with or without expert parallelism makes no difference."""
    told_apart = [key for key in keys if key not in _OWN]
    for group in stored:
        if identity(group, told_apart) == identity(own, told_apart):
            return {key: deepcopy(value) for key, value in group.items() if key not in _OWN}
    described = dict(zip(told_apart, identity(own, told_apart), strict=True))
    raise ValueError(
        f"the checkpoint has no parameter group with {described}: its parameters were grouped otherwise. Use its "
        "settings, or load the weights alone with --no-load-optim"
    )

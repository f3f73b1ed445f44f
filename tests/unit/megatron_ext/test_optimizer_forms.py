"""Stored optimizers of one form in the other: settings and steps arrive, what belongs to the run stays the run's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")

from megatron_ext.optimizer_forms import Form, has_groups, inner, joined, parted

KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


def group(wd: float, *, experts: bool = False, **settings: Any) -> dict[str, Any]:
    return {"wd_mult": wd, "lr_mult": 1.0, "is_expert_parallel": experts, "is_decoupled_lr": False, **settings}


def stored(form: Form, groups: list[dict[str, Any]], step: float) -> dict[str, Any]:
    if form == "distributed":
        sharding = {"param_state_sharding_type": "fully_reshardable"}
        return {"optimizer": {"param_groups": [{**g, "step": step} for g in groups]}, **sharding}
    found: dict[str, Any] = {
        "state": {"common_step": step},
        "param_groups": [{**g, "params": "theirs"} for g in groups],
    }
    return found if form == "fp32" else {"optimizer": found}


FORMS = st.sampled_from(["fp32", "float16", "distributed"])


@given(form=FORMS, lr=st.floats(1e-6, 1.0), step=st.integers(1, 10**6))
def test_there_and_back(form: Form, lr: float, step: int) -> None:
    two = {
        0: stored(form, [group(1.0, lr=lr), group(0.0, lr=lr / 2)], float(step)),
        1: stored(form, [group(1.0, experts=True, lr=lr * 2)], float(step)),
    }
    wanted = [group(1.0), group(0.0)]
    state: dict[Any, Any] = dict(two)
    joined(state, wanted, form=form, keys=KEYS)
    assert 0 not in state
    assert 1 not in state
    groups = inner(state, form)["param_groups"]
    assert [g["lr"] for g in groups] == [lr, lr / 2], "the dense optimizer's come first"
    assert not any(g["is_expert_parallel"] for g in groups)
    parted(state, wanted, [group(1.0, experts=True)], form=form, keys=KEYS)
    assert state.keys() == {0, 1}
    assert [g["lr"] for g in inner(state[0], form)["param_groups"]] == [lr, lr / 2]
    (experts,) = inner(state[1], form)["param_groups"]
    assert experts["is_expert_parallel"]
    assert experts["lr"] == lr
    for part in state.values():
        if form == "distributed":
            assert {g["step"] for g in inner(part, form)["param_groups"]} == {float(step)}
            assert part["param_state_sharding_type"] == "fully_reshardable"
        else:
            assert inner(part, form)["state"]["common_step"] == step


def test_parameters_of_the_template_stay() -> None:
    state: dict[Any, Any] = {
        "state": {5: "tensors", "common_step": 3.0},
        "param_groups": [group(1.0, params=[5])],
        0: {"param_groups": [{"params": ["dense"]}], "state": {1: "dense tensors"}},
        1: {"param_groups": [{"params": ["experts"]}], "state": {2: "tensors of experts"}},
    }
    parted(state, [group(1.0)], [group(1.0, experts=True)], form="fp32", keys=KEYS)
    assert state[0]["param_groups"][0]["params"] == ["dense"]
    assert state[1]["param_groups"][0]["params"] == ["experts"]
    assert state[0]["state"] == {1: "dense tensors", "common_step": 3.0}
    assert state[1]["state"] == {2: "tensors of experts", "common_step": 3.0}


def test_a_rank_without_dense_parameters_has_experts_only() -> None:
    state = stored("fp32", [group(1.0)], 2.0)
    parted(state, None, [group(1.0, experts=True)], form="fp32", keys=KEYS)
    assert state.keys() == {1}


def test_a_group_that_is_not_stored_is_named() -> None:
    state = {0: stored("fp32", [group(1.0)], 1.0), 1: stored("fp32", [group(1.0, experts=True)], 1.0)}
    with pytest.raises(ValueError, match=r"no parameter group with .*'wd_mult': 0.5.*--no-load-optim"):
        joined(state, [group(0.5)], form="fp32", keys=KEYS)


@pytest.mark.parametrize(
    ("state", "there"),
    [
        (None, False),
        ({}, False),
        ({"param_groups": []}, False),
        ({"param_groups": [{"params": [1]}]}, False),
        ({"param_groups": [{"params": [1]}, {"lr": 1.0}]}, True),
    ],
)
def test_lists_of_parameters_alone_are_no_groups(state: dict[Any, Any] | None, there: bool) -> None:
    assert has_groups(state, "fp32") is there

"""Where steps of experts in pages could differ from stock's: steps left out, scaling, groups, several models."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tests.distributed.megatron_state import fresh_parallel_state
from tests.unit.megatron_ext.layers import build, tokens
from tests.unit.megatron_ext.two_sides import EVERYWHERE, WITHOUT_3, assert_close, train_both, two_sides

# --- steps that are not made, scaling, groups -------------------------------------------------------------------------


def skip_a_step(rank: int, world: int) -> None:
    stock, paged = two_sides()
    train_both(stock, paged, (tokens(5, seed=0), EVERYWHERE))
    for side in (stock, paged):
        before, groups = side.tensors(), [dict(group) for group in side.optimizer.param_groups]
        side.clear()
        side.forward_backward(tokens(5, seed=1), EVERYWHERE)
        side.reduce()
        with mock.patch.object(type(side.optimizer.chained_optimizers[0]), "prepare_grads", return_value=True):
            assert side.optimizer.step() == (False, None, None)
        after = side.tensors()
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
        assert [dict(group) for group in side.optimizer.param_groups] == groups
    adam = paged.optimizer.paged.adam
    assert adam.num_steps == 1
    assert [adam.history.last_step(index) for index in range(len(adam.param_groups))] == [1] * len(adam.param_groups)
    train_both(stock, paged, (tokens(5, seed=2), WITHOUT_3))
    assert adam.num_steps == 2


def test_a_skipped_step_leaves_no_trace(pools):
    pools[1].run(skip_a_step)


def scale_by_tokens(rank: int, world: int) -> None:
    given = []
    for side in two_sides(bias=True, calculate_per_token_loss=True):
        side.clear()
        side.forward_backward(tokens(5, seed=0), EVERYWHERE)
        side.reduce()
        side.ddp.scale_gradients(torch.tensor(1 / 7))
        gradients = side.experts_gradients()
        side.step()
        given.append({**gradients, **side.tensors()})
    assert_close(*given)


def test_the_loss_per_token_scales_experts_gradients_too(pools):
    pools[1].run(scale_by_tokens)


def follow_schedule(rank: int, world: int, *, override: dict[str, float] | None) -> None:
    stock, paged = two_sides(bias=True, overrides=override)
    adam = paged.optimizer.paged.adam
    for step in range(3):
        groups = [
            {g["wd_mult"]: (g["lr"], g["weight_decay"]) for g in s.optimizer.param_groups} for s in (stock, paged)
        ]
        assert groups[0] == groups[1]
        expected = [groups[1][group["wd_mult"]] for group in adam.param_groups]
        train_both(stock, paged, (tokens(5, seed=step), WITHOUT_3))
        records = [adam.history.since(index, step)[0] for index in range(len(adam.param_groups))]
        assert [(record.lr, record.weight_decay) for record in records] == expected
    assert len(set(groups[0].values())) == len(groups[0]) > 1


@pytest.mark.parametrize("override", [None, {"wd_mult": 0.5, "max_lr": 3e-2, "min_lr": 1e-2}], ids=["", "experts"])
def test_the_scheduler_sets_rate_and_decay_of_experts_groups(pools, override):
    pools[1].run(follow_schedule, override=override)


# --- several models ----------------------------------------------------------------------------------------------


def train_two_models(rank: int, world: int) -> list[str]:
    """Of one run: a teacher and a student, say. Each as if it were alone."""
    fresh_parallel_state()
    alone = build(megascale=True)
    first, second = build(megascale=True, stay_enabled=True), build(megascale=True)
    for step in range(2):
        for side in (alone, first, second):
            side.train((tokens(5, seed=step), WITHOUT_3))
    for side in (first, second):
        assert [n for n, t in alone.tensors().items() if not torch.equal(t, side.tensors()[n])] == []
    assert first.layer.experts.manager is second.layer.experts.manager
    return [first.layer.experts.path, second.layer.experts.path]


def test_two_models_of_one_run_keep_apart(pools):
    assert pools[1].run(train_two_models) == [["chunk 0: mlp.experts", "chunk 0: mlp.experts (2)"]]

"""Where experts in pages could differ from stock's without anybody noticing; each beside stock's own layer.

The router routes as it is told. Both sides start from the same weights and see the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from tests.distributed.megatron_state import fresh_parallel_state
from tests.unit.megatron_ext.layers import EXPERTS, Side, build, tokens, weighted
from tests.unit.megatron_ext.two_sides import (
    EVERYWHERE,
    KINDS,
    WITHOUT_3,
    as_named,
    assert_close,
    experts_with_gradient,
    train_both,
    two_sides,
)

every_kind = pytest.mark.parametrize("kind", KINDS)


def moments_of(side: Side, expert: int) -> dict[str, torch.Tensor]:
    """Masters and moments of one expert, by kind and name."""
    found = {n: t for n, t in side.tensors().items() if f".local_experts.{expert}." in n}
    return {name: tensor for name, tensor in found.items() if not name.startswith("weight ")}


# --- which experts get tokens -------------------------------------------------------------------------------------


def alternate(rank: int, world: int, *, kind: str) -> None:
    stock, paged = two_sides(**KINDS[kind])
    for step, routes in enumerate([EVERYWHERE, WITHOUT_3, WITHOUT_3, EVERYWHERE]):
        train_both(stock, paged, (tokens(len(routes), seed=step), routes))
        assert experts_with_gradient(paged) == {expert for token in routes for expert in token}


@every_kind
def test_an_expert_active_then_inactive_then_active(pools, kind):
    """The gradient of the step before is not applied again, and the expert decays meanwhile."""
    pools[1].run(alternate, kind=kind)


def idle_adamw(stored: dict[str, torch.Tensor], group: dict[str, Any], step: int) -> dict[str, torch.Tensor]:
    """What torch's own AdamW makes of (master, moments) by a step of zero gradient."""
    parameter = torch.nn.Parameter(stored["master"].clone())
    parameter.grad = torch.zeros_like(parameter)
    dense = torch.optim.AdamW(
        [parameter], lr=group["lr"], betas=group["betas"], eps=group["eps"], weight_decay=group["weight_decay"]
    )
    moments = {key: stored[key].clone() for key in ("exp_avg", "exp_avg_sq")}
    dense.state[parameter] = {"step": torch.tensor(float(step - 1)), **moments}
    dense.step()
    return {"master": parameter.detach(), **moments}


def leave_one_alone(rank: int, world: int, *, kind: str) -> None:
    fresh_parallel_state()
    side = build(megascale=True, **KINDS[kind])
    side.train((tokens(5, seed=0), EVERYWHERE))
    for step in (2, 3):
        before = moments_of(side, 3)
        groups = {group["wd_mult"]: dict(group) for group in side.optimizer.paged.param_groups}
        side.train((tokens(5, seed=step), WITHOUT_3))
        after = moments_of(side, 3)
        names = {name.partition(" ")[2] for name in before}
        for name in names:
            stored = {kind_: before[f"{kind_} {name}"] for kind_ in ("master", "exp_avg", "exp_avg_sq")}
            group = groups[0.0 if name.endswith(".bias") else 1.0]
            for key, expected in idle_adamw(stored, group, step).items():
                assert torch.equal(after[f"{key} {name}"], expected), f"step {step}: {key} of {name}"


@every_kind
def test_an_untouched_expert_takes_dense_adamws_step_bit_for_bit(pools, kind):
    pools[1].run(leave_one_alone, kind=kind)


def decay_weights_alone(rank: int, world: int) -> None:
    """Never touched: moments are zero, so that decay is all there is."""
    fresh_parallel_state()
    side = build(megascale=True, bias=True)
    with torch.no_grad():  # stock starts biases at zero, which would not show a decay
        side.layer.experts.load_dense({n: torch.ones_like(t) for n, t in side.layer.experts.dense().items()})
    decay = 1.0
    for step in range(3):
        group = next(g for g in side.optimizer.paged.param_groups if g["wd_mult"] == 1.0)
        decay *= 1 - group["lr"] * group["weight_decay"]
        side.train((tokens(2, seed=step), [[0], [1]]))
    for name, tensor in side.layer.experts.dense().items():
        if ".local_experts.2." in f".{name}":
            expected = torch.ones_like(tensor) * (1.0 if name.endswith(".bias") else decay)
            assert torch.allclose(tensor, expected, rtol=1e-6), name


def test_biases_are_not_decayed_and_weights_are(pools):
    pools[1].run(decay_weights_alone)


ROUTES: dict[str, Sequence[Iterable[int]]] = {
    "all to the last expert": [[3], [3], [3]],
    "all to the first": [[0], [0]],
    "one token": [[2]],
    "one token to all experts": [range(EXPERTS)],
    "no tokens in the whole step": [[], [], []],
    "some tokens to nobody": [[], [1], []],
}


def route_oddly(rank: int, world: int, *, kind: str, dispatcher: str) -> list[str]:
    """All odd routes, one after the other on the same two sides; which were gone through."""
    stock, paged = two_sides(**KINDS[kind], dispatcher=dispatcher)
    gone = []
    for step, (name, routes) in enumerate(ROUTES.items()):
        train_both(stock, paged, (tokens(len(routes), seed=step), routes))
        assert experts_with_gradient(paged) == {expert for token in routes for expert in token}, name
        gone.append(name)
    train_both(stock, paged, (tokens(5, seed=9), EVERYWHERE))
    return gone


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("kind", ["fp32", "biases"])
def test_odd_routes(pools, kind, dispatcher):
    assert pools[1].run(route_oddly, kind=kind, dispatcher=dispatcher) == [list(ROUTES)]


def accumulate(rank: int, world: int, *, kind: str) -> None:
    stock, paged = two_sides(**KINDS[kind])
    for step in range(2):
        first = (tokens(3, seed=step), [[0, 1], [0], [1]])
        second = (tokens(4, seed=step + 10), [[0, 2], [2], [0], [2]])
        train_both(stock, paged, first, (tokens(2, seed=3), [[], []]), second)
        assert experts_with_gradient(paged) == {0, 1, 2}


@pytest.mark.parametrize("kind", ["biases", "bf16"])
def test_micro_batches_accumulate_whoever_gets_tokens_in_which(pools, kind):
    pools[1].run(accumulate, kind=kind)


# --- frozen parts -------------------------------------------------------------------------------------------------


def freeze_inputs(rank: int, world: int) -> None:
    gradients = []
    for side in two_sides(freeze_dense=True):
        side.clear()
        output = side.forward(tokens(5, seed=0), EVERYWHERE, frozen_router=True)
        assert output.requires_grad, "the graph ends at the experts"
        weighted(output).backward()
        side.reduce()
        gradients.append(side.experts_gradients())
        assert all(bool(gradient.any()) for gradient in gradients[-1].values())
        side.step()
        gradients[-1] |= side.tensors()
    assert_close(*gradients)


def test_frozen_inputs_and_router_leave_experts_their_gradients(pools):
    pools[1].run(freeze_inputs)


def freeze_experts(rank: int, world: int, *, kind: str) -> None:
    stock, paged = two_sides(**KINDS[kind], freeze_experts=True)
    before = paged.layer.experts.dense()
    given = []
    for side in (stock, paged):
        side.clear()
        last = side.forward_backward(tokens(5, seed=0), EVERYWHERE)
        side.reduce()
        successful, norm, zeros = side.step()
        assert successful
        given.append({**as_named(*last), "norm": torch.tensor(norm), "zeros": torch.tensor(zeros)})
    assert_close(*given)
    assert experts_with_gradient(paged) == set()
    after = paged.layer.experts.dense()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert paged.optimizer.paged.adam.modules == ()


@pytest.mark.parametrize("kind", ["fp32", "bf16", "distributed"])
def test_frozen_experts_pass_gradients_on_and_stay(pools, kind):
    pools[1].run(freeze_experts, kind=kind)


# --- gradients that are not there, and such that are not finite -------------------------------------------------------


def train_in_poison(rank: int, world: int) -> None:
    """Slots are NaN when they are taken: a page that is read before it was written would show."""
    fresh_parallel_state()
    clean, poisoned = build(megascale=True, bias=True), build(megascale=True, bias=True, poison=True)
    for side in (clean, poisoned):
        for step in range(3):
            side.clear()
            side.forward_backward(tokens(2, seed=step), [[0], [1]])
            assert experts_with_gradient(side) == {0, 1}
            side.reduce()
            _, norm, zeros = side.step()
            assert norm is not None
            assert norm > 0
            assert zeros >= 2 * side.layer.experts.shape.num_parameters, "untouched elements count as zeros"
    first, second = clean.tensors(), poisoned.tensors()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    poisoned.clear()
    assert experts_with_gradient(poisoned) == set()
    poisoned.layer.experts.manager.check_integrity()


def test_gradient_pages_of_untouched_experts_are_absent_not_uninitialised(pools):
    pools[1].run(train_in_poison)


def poison_a_gradient(side: Side, expert: int) -> None:
    """One element of the gradient of an expert's first matrix becomes NaN."""
    experts = side.layer.experts
    if side.ddp.__class__.__name__ == "MegaScaleDDP":
        for (owner, _), page in side.ddp.gradients.pages(experts):
            if owner == expert:
                page[0] = torch.nan
                return
        raise AssertionError(f"expert {expert} has no gradient")
    experts.local_experts[expert].linear_fc1.weight.main_grad.view(-1)[0] = torch.nan


def go_on_with_nan(rank: int, world: int, *, kind: str) -> None:
    given = []
    for side in two_sides(**KINDS[kind]):
        side.clear()
        side.forward_backward(tokens(5, seed=0), EVERYWHERE)
        poison_a_gradient(side, 2)
        side.reduce()
        successful, norm, _ = side.step()
        given.append({"successful": torch.tensor(successful), "norm": torch.tensor(norm), **side.tensors()})
        assert any(bool(torch.isnan(tensor).any()) for tensor in given[-1].values())
    assert_close(*given)


@pytest.mark.parametrize("kind", ["bf16", "distributed", "clipped"])
def test_a_nan_without_the_check_does_what_it_does_in_stock(pools, kind):
    pools[1].run(go_on_with_nan, kind=kind)


def end_at_nan(rank: int, world: int) -> list[str]:
    fresh_parallel_state()
    messages = []
    side = build(megascale=True, check_for_nan=True)
    for spoil in (lambda: poison_a_gradient(side, 2), lambda: side.ddp.module.scale.main_grad.fill_(torch.inf)):
        side.clear()
        side.forward_backward(tokens(5, seed=0), EVERYWHERE)
        spoil()
        with pytest.raises(RuntimeError) as error:
            side.reduce()
        messages.append(str(error.value))
    side.train((tokens(5, seed=0), EVERYWHERE))
    return messages


def test_a_nan_under_the_check_names_expert_or_parameter(pools):
    ((expert, parameter),) = pools[1].run(end_at_nan)
    assert "rank 0: chunk 0: mlp.experts, local expert 2 (slice 0): 1 non-finite elements" in expert
    assert "--no-check-for-nan-in-loss-and-grad" in expert
    assert "rank 0: parameter scale" in parameter

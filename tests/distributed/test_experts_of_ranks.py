"""Experts that are spread over ranks or copied on them: nobody waits, nothing is counted twice or left out.

One layer with a router that routes as it is told, beside stock's own on the same ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from tests.distributed.megatron_state import fresh_parallel_state
from tests.unit.megatron_ext.layers import EXPERTS, HIDDEN, Side, build, tokens

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")

Routes = Sequence[Iterable[int]]


def two_sides(*, ep: int, **options: Any) -> tuple[Side, Side]:
    fresh_parallel_state(ep=ep)
    return build(megascale=False, ep=ep, **options), build(megascale=True, ep=ep, **options)


def differences(
    stock: dict[str, torch.Tensor], paged: dict[str, torch.Tensor], *, tolerance: float = 1e-4
) -> list[str]:
    """Names that one side lacks, or whose tensors differ by more than that of their norm (see unit tests' traps)."""
    found = sorted(stock.keys() ^ paged.keys())
    for name in stock.keys() & paged.keys():
        nan = torch.isnan(stock[name])
        same_nan = torch.equal(nan, torch.isnan(paged[name]))
        first, second = (torch.where(nan, 0.0, tensor.double()) for tensor in (stock[name], paged[name]))
        if not same_nan or not (first - second).norm() <= tolerance * first.norm() + 1e-9:
            found.append(f"{name}: {float((first - second).norm())} of {float(first.norm())}")
    return found


def train(side: Side, x_Th: torch.Tensor, routes: Routes) -> dict[str, torch.Tensor]:
    """A step; all that it gives and changes."""
    side.clear()
    output, grad_tokens, grad_probs = side.forward_backward(x_Th, routes)
    side.reduce()
    gradients = side.experts_gradients()
    _, norm, zeros = side.step()
    given = {"output": output, "gradient of tokens": grad_tokens, "gradient of probabilities": grad_probs}
    return {**given, **gradients, **side.tensors(), "norm": torch.tensor(norm), "zeros": torch.tensor(zeros)}


# --- ranks without tokens ---------------------------------------------------------------------------------------------

UNEVEN: dict[str, list[list[list[int]]]] = {
    # Which experts each of a rank's two tokens goes to, by rank modulo 2. With EP 2 rank 0 has experts 0 and 1.
    "all to rank 0's experts": [[[0, 1], [1]], [[0], [0]]],
    "all to the last expert": [[[3], [3]], [[3], [3]]],
    "one token in all": [[[2], []], [[], []]],
    "nothing from rank 1": [[[0, 3], [2]], [[], []]],
    "no tokens at all": [[[], []], [[], []]],
    "everywhere": [[[0, 1], [2, 3]], [[0, 2], [1, 3]]],
}


def train_unevenly(rank: int, world: int, *, ep: int, kind: dict[str, Any]) -> dict[str, list[str]]:
    """Several steps, each with other routes; what differs from stock by route. Memory is poisoned where it is taken."""
    stock, paged = two_sides(ep=ep, poison=True, **kind)
    found: dict[str, list[str]] = {}
    for step, (name, by_rank) in enumerate(UNEVEN.items()):
        routes = by_rank[rank % 2]
        x_Th = tokens(len(routes), seed=100 * step + rank)
        found[name] = differences(train(stock, x_Th, routes), train(paged, x_Th, routes))
        present = {expert for expert, _ in paged.ddp.gradients.present(paged.layer.experts)}
        local = EXPERTS // ep
        first = local * (rank % ep)
        wanted = {expert - first for r in by_rank for token in r for expert in token} & set(range(local))
        wanted &= {expert for expert, _ in paged.optimizer.paged.adam.shards.owned(paged.layer.experts)}
        if present != wanted:
            found[name].append(f"gradient pages of {present} instead of {wanted}")
    return found


@pytest.mark.parametrize(
    ("world", "ep", "kind"),
    [
        (2, 2, {"dispatcher": "allgather", "bias": True}),
        (2, 2, {"distributed": True, "bf16": True}),
        (2, 1, {"bias": True}),
        (2, 1, {"distributed": True, "bias": True}),
        (4, 2, {"bias": True}),
        (4, 2, {"distributed": True}),
    ],
    ids=["ep2-allgather", "ep2-distributed-bf16", "dp2", "dp2-distributed", "ep2dp2", "ep2dp2-distributed"],
)
def test_ranks_without_tokens_join_and_get_what_stock_gets(pools, world, ep, kind):
    answers = pools[world].run(train_unevenly, ep=ep, kind=kind)
    assert answers == [{name: [] for name in UNEVEN}] * world


# --- gradients under expert parallelism ---------------------------------------------------------------------------


def gradients_of_experts(rank: int, world: int, *, ep: int, distributed: bool) -> dict[str, torch.Tensor]:
    """Gradients of the mean over 8 tokens, 8 / world of them on each rank, by global expert."""
    fresh_parallel_state(ep=ep)
    side = build(megascale=True, ep=ep, bias=True, distributed=distributed)
    local = EXPERTS // ep
    first = local * (rank % ep)

    def of_global(name: str, expert: int) -> str:
        return name.replace(f"local_experts.{expert - first}.", f"local_experts.{expert}.")

    with torch.no_grad():  # the same experts on any number of ranks
        weights = side.layer.experts.dense()
        for name, tensor in weights.items():
            expert = first + int(name.split(".")[1])
            seed = 100 * expert + [
                "linear_fc1.weight",
                "linear_fc1.bias",
                "linear_fc2.weight",
                "linear_fc2.bias",
            ].index(name.split(".", 2)[2])
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)) / HIDDEN**0.5)
        side.layer.experts.load_dense(weights)
    x_Th, routes = tokens(8, seed=0), [[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [1, 3], [0], [2, 3]]
    share = slice(rank * 8 // world, (rank + 1) * 8 // world)
    side.clear()
    output = side.forward(x_Th[share], routes[share])
    factors = torch.linspace(-1.0, 1.5, 8 * HIDDEN).view(8, HIDDEN)[share]
    (output * factors).mean().backward()
    side.reduce()
    _, norm, _ = side.optimizer.step()
    found = {"norm": torch.tensor(norm)}
    for name, gradient in side.experts_gradients().items():
        expert = first + int(name.partition("local_experts.")[2].split(".")[0])
        found[of_global(name, expert)] = gradient
    return found


@pytest.mark.parametrize(("world", "ep", "distributed"), [(2, 2, False), (2, 1, True), (4, 2, True), (4, 4, False)])
def test_gradients_of_experts_are_those_of_one_rank_not_a_multiple(pools, world, ep, distributed):
    (alone,) = pools[1].run(gradients_of_experts, ep=1, distributed=distributed)
    spread = pools[world].run(gradients_of_experts, ep=ep, distributed=distributed)
    names = set()
    for found in spread:
        for name, gradient in found.items():
            assert torch.allclose(gradient, alone[name], rtol=1e-5, atol=1e-8), name
            names.add(name)
    assert names == set(alone)


# --- norms and zeros over ranks -------------------------------------------------------------------------------------


def norms_of_known_gradients(rank: int, world: int, *, distributed: bool) -> dict[float, dict[str, float]]:
    """Rank 0's experts have gradients of squared norm 20, rank 1's of 100, dense parameters none. By `clip_grad`."""
    fresh_parallel_state(ep=2)
    found = {}
    for clip_grad in (0.0, 1.0):
        side = build(megascale=True, ep=2, distributed=distributed, clip_grad=clip_grad)
        experts = side.layer.experts
        side.clear()
        side.forward_backward(tokens(3, seed=rank), [[0, 1, 2, 3]] * 3)
        for parameter in side.ddp.parameters():
            parameter.main_grad.zero_()
        for (expert, _), page in side.ddp.gradients.pages(experts):
            page.zero_()
            if expert == 1:  # the last local one: where state is sharded another rank than that of expert 0 has it
                # Before the reduction over copies of an expert: each has its share of the gradient.
                share = torch.tensor([2.0, 4.0] if rank % 2 == 0 else [6.0, 8.0])
                page[:2] = share / side.ddp.gradient_scale / (world // 2)
        side.reduce()
        side.optimizer.prepare_grads()
        norm, zeros = side.optimizer.get_grad_norm(), side.optimizer.count_zeros()
        coefficient = side.optimizer.paged.clip_coefficient
        found[clip_grad] = {
            "norm": norm,
            "zeros": zeros - sum(parameter.numel() for parameter in side.ddp.parameters()),
            "numel": float(2 * experts.num_parameters),
            "coefficient": 1.0 if coefficient is None else coefficient,
        }
    return found


@pytest.mark.parametrize(("world", "distributed"), [(2, False), (2, True), (4, False), (4, True)])
def test_ranks_owning_experts_of_squared_norm_20_and_100_both_report_10_954452(pools, world, distributed):
    for by_clip in pools[world].run(norms_of_known_gradients, distributed=distributed):
        for clip_grad, found in by_clip.items():
            assert found["norm"] == pytest.approx(10.954452, abs=1e-5)
            assert found["zeros"] == found["numel"] - 4, "each element is counted once"
            expected = 1.0 if clip_grad == 0.0 else 1.0 / (10.954452 + 1e-6)
            assert found["coefficient"] == pytest.approx(expected, rel=1e-6)


# --- non-finite gradients --------------------------------------------------------------------------------------------


def spoil(side: Side, expert: int) -> None:
    experts = side.layer.experts
    if hasattr(side.ddp, "gradients"):
        for (owner, _), page in side.ddp.gradients.pages(experts):
            if owner == expert:
                page[0] = torch.nan
    else:
        experts.local_experts[expert].linear_fc1.weight.main_grad.view(-1)[0] = torch.nan


def meet_nan_on_one_rank(rank: int, world: int, *, ep: int) -> str:
    """With the check: what every rank ends with."""
    fresh_parallel_state(ep=ep)
    side = build(megascale=True, ep=ep, check_for_nan=True)
    side.clear()
    side.forward_backward(tokens(2, seed=rank), [[0, 1, 2, 3]] * 2)
    if rank == 1:
        spoil(side, 1)
    with pytest.raises(RuntimeError) as error:
        side.reduce()
    return str(error.value)


@pytest.mark.parametrize(("world", "ep"), [(2, 2), (2, 1), (4, 2)])
def test_with_the_check_every_rank_ends_with_the_expert_named(pools, world, ep):
    messages = pools[world].run(meet_nan_on_one_rank, ep=ep)
    assert len(set(messages)) == 1
    assert "rank 1: chunk 0: mlp.experts, local expert 1 (slice 0): 1 non-finite elements" in messages[0]
    assert "rank 0" not in messages[0]


def go_on_with_nan_on_one_rank(rank: int, world: int, *, ep: int, distributed: bool) -> list[str]:
    given = []
    for side in two_sides(ep=ep, distributed=distributed, clip_grad=1.0):
        side.clear()
        side.forward_backward(tokens(2, seed=rank), [[0, 1, 2, 3]] * 2)
        if rank == 1:
            spoil(side, 1)
        side.reduce()
        _, norm, zeros = side.step()
        given.append({"norm": torch.tensor(norm), "zeros": torch.tensor(zeros), **side.tensors()})
    assert torch.isnan(given[0]["norm"])
    return differences(*given)


@pytest.mark.parametrize(("world", "ep", "distributed"), [(2, 2, False), (2, 1, True), (4, 2, True)])
def test_without_the_check_it_does_what_it_does_in_stock(pools, world, ep, distributed):
    assert pools[world].run(go_on_with_nan_on_one_rank, ep=ep, distributed=distributed) == [[]] * world


# --- weights from the first copy ----------------------------------------------------------------------------------


def broadcast_weights(rank: int, world: int, *, ep: int) -> dict[str, torch.Tensor]:
    """Every rank has drawn other weights, as with a random initialisation a data-parallel rank."""
    fresh_parallel_state(ep=ep)
    side = build(megascale=True, ep=ep, bias=True)
    with torch.no_grad():
        for parameter in side.ddp.parameters():
            parameter.fill_(float(rank))
        experts = side.layer.experts
        experts.load_dense({name: torch.full_like(t, float(rank)) for name, t in experts.dense().items()})
    side.ddp.broadcast_params()
    return {name: tensor.unique() for name, tensor in side.state.weights().items()}


@pytest.mark.parametrize(("world", "ep"), [(2, 1), (4, 2)])
def test_weights_are_broadcast_from_the_first_rank_that_has_them(pools, world, ep):
    for rank, weights in enumerate(pools[world].run(broadcast_weights, ep=ep)):
        for name, values in weights.items():
            assert values.tolist() == [float(rank % ep) if ".experts." in name else 0.0], name


# --- mistakes that strike one rank ----------------------------------------------------------------------------------


def group_experts_apart_on_one_rank(rank: int, world: int) -> str:
    """An override that splits the experts of a module, where only rank 1 has such an expert."""
    from megatron.core import optimizer
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate

    fresh_parallel_state(ep=2)
    standard = optimizer.get_standard_config_overrides
    splits = ParamWithNamePredicate(name="split", fn=lambda p, name: rank == 1 and "local_experts.1." in name)
    key = ParamKey(with_name_predicate=splits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "get_standard_config_overrides", lambda c: {**standard(c), key: {"wd_mult": 0.5}})
        with pytest.raises(ValueError) as error:
            build(megascale=True, ep=2)
    return str(error.value)


def test_groups_that_one_rank_refuses_are_refused_by_all(pools):
    first, second = pools[2].run(group_experts_apart_on_one_rank)
    assert first == second
    assert "experts of one module cannot be in different parameter groups with --megascale" in first

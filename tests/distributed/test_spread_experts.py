"""Experts whose pages are spread over ranks (expert tensor parallelism): rows gathered, parts reduce-scattered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale_omni.groups.channel import Channel
from megascale_omni.groups.dispatch import GroupDispatcher, GroupOptions
from megascale_omni.groups.spread import gather_rows, scatter_sums
from tests.distributed.group_side import GroupSide, random_map
from tests.distributed.megatron_state import fresh_parallel_state
from tests.distributed.test_experts_of_ranks import Routes, differences, train
from tests.unit.experts.paged import FFN, gradients, small_experts
from tests.unit.megatron_ext.layers import build, tokens

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")

SPREAD = {"expert_tensor_parallel_size": 2}
SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True, **SPREAD}
EVEN: list[list[list[list[int]]]] = [
    [[[0, 3], [2], []], [[1], [], [3]], [[1, 2], [0], [0]], [[0], [3], [2]]],
    [[[0, 1, 2, 3], [0], [0]], [[], [], []], [[2], [2], [2]], [[1, 3], [], [1]]],
    [[[3]] * 3, [[0, 1], [], []], [[3], [2, 0], [1]], [[], [], []]],
]
"""By step and rank, the experts of each token; as many tokens on each rank, which stock's all-gather needs."""


def train_both(
    rank: int, world: int, *, layout: dict[str, int], groups: dict[str, object] | None, kind: dict[str, Any]
) -> tuple[list[str], int, int]:
    """What differs after each step; neurons of an expert on this rank; rows given to ranks with its other pages."""
    fresh_parallel_state(**layout)
    kind = {"ep": layout["ep"], "dispatcher": "allgather", **kind}
    stock, ours = build(megascale=False, **kind), build(megascale=True, poison=True, groups=groups, **kind)
    found = []
    for step, by_rank in enumerate(EVEN):
        routes: Routes = by_rank[rank % 4]
        x_Th = tokens(len(routes), seed=10 * step + rank)
        first, second = train(stock, x_Th, routes), train(ours, x_Th, routes)
        tolerance = 1e-4
        if kind.get("bf16"):
            tolerance = 3e-2
            ours.state.load(stock.state.state())
            first, second = ({n: t for n, t in of.items() if n in ("output", "norm")} for of in (first, second))
        found += [f"step {step}: {name}" for name in differences(first, second, tolerance=tolerance)]
    sent = 0 if groups is None else int(ours.layer.token_dispatcher.metrics()["rows_spread"])
    return found, ours.layer.experts.shape.ffn, sent


@pytest.mark.parametrize(
    ("world", "layout", "kind", "groups"),
    [
        (4, {"tp": 1, "ep": 2, "etp": 2}, {**SPREAD, "clip_grad": 0.1}, None),
        (4, {"tp": 1, "ep": 2, "etp": 2}, {**SPREAD, "clip_grad": 0.1}, {"move": "auto"}),
        (2, {"tp": 2, "ep": 1, "etp": 2}, {**SEQUENCE, "gated": False}, {"move": "tokens"}),
        (4, {"tp": 2, "ep": 1, "etp": 2}, {**SEQUENCE, "distributed": True, "bf16": True}, {"move": "tokens"}),
    ],
    ids=["ep2etp2-stock's-dispatcher", "ep2etp2", "tp2-ungated", "tp2dp2-bf16-distributed"],
)
def test_a_step_gives_what_stock_gives(pools, world, layout, kind, groups):
    for found, neurons, sent in pools[world].run(train_both, layout=layout, groups=groups, kind=kind):
        assert found == []
        assert neurons == 24
        assert (sent > 0) == (groups is not None)


# --- any number of rows, in a fixed order -----------------------------------------------------------------------------


def sum_in_order(rank: int, world: int, *, dtype: torch.dtype) -> list[str]:
    """What is wrong with rows of all ranks, their sums, or gradients; ranks have 3, 0, 5 and 1 rows."""
    counts = (3, 0, 5, 1)
    given = [torch.randn(n, 7, generator=torch.Generator().manual_seed(p)).to(dtype) for p, n in enumerate(counts)]
    parts = [
        (torch.randn(sum(counts), 7, generator=torch.Generator().manual_seed(100 + p)) * 3.0**p).to(dtype)
        for p in range(world)
    ]
    channel = Channel(dist.group.WORLD)
    own = given[rank].clone().requires_grad_()
    rows = gather_rows(own, channel, counts)
    rows.backward(parts[rank])
    part = parts[rank].clone().requires_grad_()
    sums = scatter_sums(part, channel, counts)
    sums.backward(given[rank])
    expected = torch.zeros(sum(counts), 7)
    for one in parts:
        expected = expected + one.float()
    expected = expected.to(dtype)
    mine = expected.split(counts)[rank]
    assert own.grad is not None
    assert part.grad is not None
    pairs = {"rows": (rows, torch.cat(given)), "sums": (sums, mine), "grad": (own.grad, mine)}
    pairs["gradients of parts"] = (part.grad, torch.cat(given))
    return [name for name, (found, wanted) in pairs.items() if not torch.equal(found, wanted)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_are_added_by_ascending_rank_and_rounded_once(pools, dtype):
    assert pools[4].run(sum_in_order, dtype=dtype) == [[]] * 4


class SpreadSide(GroupSide):
    """Two experts on each of two places; rank ``r`` has half ``r % 2`` of the neurons of those at place ``r // 2``."""

    def __init__(self, rank: int) -> None:
        places = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        super().__init__(Channel(places[rank % 2]), GroupOptions(move="auto"))
        whole, self.local = self.local, small_experts(num_experts=2, ffn=FFN // 2, rows=16)
        self.half = rank % 2
        self.local.load_dense({name: self.part(name, tensor) for name, tensor in whole.dense().items()})
        channel, spread = Channel(places[rank % 2]), Channel(halves[rank // 2])
        self.dispatcher = GroupDispatcher(channel, 4, options=self.dispatcher.options, spread=spread)

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's half of a tensor of a whole expert."""
        if "linear_fc2" in name:
            return tensor.chunk(2, dim=1)[self.half]
        gate, up = tensor.chunk(2)
        return torch.cat([gate.chunk(2)[self.half], up.chunk(2)[self.half]])


def dispatch_unevenly(rank: int, world: int) -> dict[str, float]:
    """How far ranks with 0, 7, 2 and 12 tokens are from what all experts on one rank make of these."""
    side = SpreadSide(rank)
    count = (0, 7, 2, 12)[rank]
    map_TE = random_map(count, 4, seed=rank)
    map_TE[:, 3] &= rank == 1
    x_Th = torch.randn(count, 24, generator=torch.Generator().manual_seed(rank))
    probs_TE = torch.rand(map_TE.shape, generator=torch.Generator().manual_seed(rank))
    ours = side.dispatched(x_Th.clone().requires_grad_(), map_TE, probs_TE.clone().requires_grad_())
    alone = side.alone(x_Th.clone().requires_grad_(), map_TE, probs_TE.clone().requires_grad_())
    worst = {
        name: float((a - b).abs().max()) if count else 0.0
        for name, a, b in zip(("output", "tokens", "probs"), ours, alone, strict=True)
    }
    found, expected = gradients(side.local), gradients(side.whole)
    for tensor in expected.values():
        dist.all_reduce(tensor)
    for name, tensor in found.items():
        worst[name] = float((tensor - side.part(name, expected[side.whole_name(name)])).abs().max())
    return worst


def test_uneven_tokens_and_a_rank_without_any(pools):
    for worst in pools[4].run(dispatch_unevenly):
        assert max(worst.values()) < 1e-4, worst


def test_pages_that_are_spread_do_not_travel():
    spread = Channel(None)
    spread.size = 2
    with pytest.raises(ValueError, match=r"distributed\.move=pages does not go with experts whose pages are spread"):
        GroupDispatcher(Channel(None), 4, options=GroupOptions(move="pages"), spread=spread)

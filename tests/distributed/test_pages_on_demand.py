"""Updated pages that come when tokens need them: the bits of all pages at each step, fewer bytes, no stale read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.megatron_state import fresh_parallel_state
from tests.distributed.test_experts_of_ranks import differences, train
from tests.unit.megatron_ext.layers import EXPERTS, FFN, HIDDEN, build, tokens

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")

# Which experts a rank's tokens choose, step by step: one that is idle for long, ranks without tokens, other experts
# than the step before. Ranks alternate.
STEPS: list[list[list[list[int]]]] = [
    [[[0, 1], [2]], [[1], [3]]],
    [[[0]], [[0]]],
    [[[1]], []],
    [[], [[2, 3]]],
    [[[3], [0]], [[2], [1, 0]]],
    [[], []],
    [[[0, 1, 2, 3]], [[0, 1, 2, 3]]],
]


def train_both_ways(rank: int, world: int, *, ep: int, kind: dict[str, Any], groups: dict[str, Any] | None) -> Any:
    """Differences from stock, and from a run with all pages at each step (bit for bit), by step."""
    fresh_parallel_state(ep=ep)
    stock = build(megascale=False, ep=ep, distributed=True, **kind)
    whole, asked = (
        build(megascale=True, ep=ep, distributed=True, poison=True, fetch=fetch, groups=groups, **kind)
        for fetch in ("step", "demand")
    )
    found = []
    for step, by_rank in enumerate(STEPS):
        routes = by_rank[rank % 2]
        x_Th = tokens(len(routes), seed=100 * step + rank)
        given = [train(side, x_Th, routes) for side in (stock, whole, asked)]
        if kind.get("bf16"):  # bf16 beside stock is the proof's business
            given[0] = given[1]
        found += [f"step {step}: {what}" for what in differences(given[0], given[2])]
        found += [f"step {step}: {n} differs in bits" for n in given[1] if not torch.equal(given[1][n], given[2][n])]
        with torch.no_grad():  # evaluation asks, too
            outputs = [side.forward(x_Th, routes) for side in (whole, asked)]
        if not torch.equal(*outputs):
            found.append(f"step {step}: evaluation differs")
    return found


@pytest.mark.parametrize(
    ("world", "ep", "kind", "groups"),
    [
        (2, 1, {"bias": True}, None),
        (2, 1, {"bf16": True}, None),
        (4, 2, {"gated": False}, {"move": "pages"}),
    ],
    ids=["dp2", "dp2-bf16", "ep2dp2-pages"],
)
def test_results_have_the_bits_of_all_pages_at_each_step(pools, world, ep, kind, groups):
    assert pools[world].run(train_both_ways, ep=ep, kind=kind, groups=groups, timeout_seconds=60.0) == [[]] * world


def step_without_reading(rank: int, world: int) -> Any:
    """Bytes of weights that the rank sent from a step to the end of the next forward, and what a stale read says."""
    from scripts.comparison.collectives import CollectiveCounter

    fresh_parallel_state(ep=1)
    side = build(megascale=True, distributed=True, fetch="demand")
    side.train((tokens(2, seed=rank), [[0, 1], [2, 3]]))
    side.clear()
    side.forward_backward(tokens(1, seed=rank), [[0]])
    side.reduce()
    experts, adam = side.layer.experts, side.layer.experts.adam
    counter = CollectiveCounter()
    counter.install(everywhere=True)
    try:
        adam.step()
        stepped = counter.sent_bytes
        with torch.no_grad():
            side.forward(tokens(1, seed=rank), [[0]] if rank == 0 else [[1]])
        asked = counter.sent_bytes - stepped
    finally:
        counter.remove()
    owned = {expert for expert, _ in adam.shards.owned(experts)}
    lagging = [e for e in range(EXPERTS) if experts.manager.table.last_step[experts.page_ids(0, [(e, 0)])[0]] < 2]
    elsewhere = next(e for e in lagging if e not in owned)
    with pytest.raises(RuntimeError) as error:
        experts.manager.catch_up(experts.pages, experts.page_ids(0, [(elsewhere, 0)]))
    adam.fetch_all(experts)
    dense = {name: tensor.clone() for name, tensor in experts.dense().items()}
    return stepped, asked, sorted(owned), lagging, str(error.value), dense


def test_only_what_is_asked_for_is_sent_and_nothing_stale_is_read(pools):
    first, second = pools[2].run(step_without_reading)
    assert (first[2], second[2]) == ([0, 1], [2, 3])
    for stepped, _, _, _, message, _ in (first, second):
        assert stepped == 0, "a step sends nothing"
        assert "were not fetched; call PagedAdam.fetch_all() on all ranks" in message
    mask, expert = 1, 3 * HIDDEN * FFN * 4
    assert (first[1], second[1]) == (mask + expert, mask), "expert 1, from its owner; nothing else is asked for"
    assert 1 not in second[3]
    assert 3 in first[3]
    assert all(torch.equal(first[5][name], second[5][name]) for name in first[5])


def refuse_without_shards(rank: int, world: int) -> str:
    fresh_parallel_state(ep=1)
    with pytest.raises(ValueError) as error:
        build(megascale=True, fetch="demand")
    return str(error.value)


def test_demand_needs_state_that_is_sharded(pools):
    for message in pools[2].run(refuse_without_shards):
        assert message == "--megascale-fetch demand needs state that is sharded; add --use-distributed-optimizer"

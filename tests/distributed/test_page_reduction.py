"""Gradient pages are summed among the ranks that touched them, travel no further, and may travel as bf16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale_omni.bulk import TorchBulk
from megascale_omni.experts.reduction import owners_of, plan_reductions
from megascale_omni.experts.shards import PageShards
from tests.distributed.megatron_state import fresh_parallel_state
from tests.distributed.test_experts_of_ranks import differences, train
from tests.unit.megatron_ext.layers import EXPERTS, FFN, HIDDEN, build, tokens

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")

EXPERT_NUMEL = 3 * HIDDEN * FFN


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 3), st.booleans(), st.integers(0, 10**6))
def test_every_touched_page_is_added_up_once_by_who_keeps_it_or_has_it(ranks, pages, slices, sharded, seed):
    touched = np.random.default_rng(seed).random((ranks, pages * slices)) < 0.4
    owners = owners_of(PageShards(size=ranks), pages * slices) if sharded else None
    plan = plan_reductions(touched, num_slices=slices, owners_P=owners)
    assert [e * slices + s for (e, s) in (item.name for item in plan)] == np.nonzero(touched.any(0))[0].tolist()
    for item in plan:
        page = item.name[0] * slices + item.name[1]
        assert item.members == tuple(np.nonzero(touched[:, page])[0])
        assert item.reducer == owners[page] if owners is not None else item.reducer in item.members
    if owners is not None:
        for rank in range(ranks):
            assert np.nonzero(owners == rank)[0].tolist() == list(PageShards(size=ranks).range_of(rank, pages * slices))


# Which experts a rank's tokens choose, EP 1: pages that all, some, one and none of the ranks touch.
ROUTES = [[[0], [0, 1]], [[0, 2]], [[0]], [[0, 2], []]]


class CountingBulk(TorchBulk):
    """Counts the tensors that it packs."""

    packed = 0

    def pack(self, gradients: Sequence[torch.Tensor], wire: torch.Tensor) -> None:
        self.packed += len(gradients)
        super().pack(gradients, wire)


def reduce_counted(rank: int, world: int, *, distributed: bool, wire: str) -> Any:
    """Bytes that this rank sends to reduce expert gradients, which pages it has then, and whether stock agrees."""
    from scripts.comparison.collectives import CollectiveCounter

    fresh_parallel_state(ep=1)
    stock = build(megascale=False, distributed=distributed)
    ours = build(megascale=True, distributed=distributed, grad_wire=wire, poison=True)
    x_Th, routes = tokens(len(ROUTES[rank]), seed=rank), ROUTES[rank]
    found = differences(
        train(stock, x_Th, routes), train(ours, x_Th, routes), tolerance=1e-4 if wire == "fp32" else 2e-2
    )
    if wire == "bf16":  # Adam makes large updates of small gradients
        found = [line for line in found if line.startswith(("output", "norm", "0."))]
    ours.clear()
    ours.forward_backward(x_Th, routes)
    shards = ours.layer.experts.adam.shards
    bulk = ours.layer.experts.manager.bulk = CountingBulk()
    counter = CollectiveCounter()
    counter.install(everywhere=True)
    try:
        ours.ddp.gradients.finish(scale=ours.ddp.gradient_scale, group=ours.ddp.expt_dp_group, shards=shards)
        sent = counter.sent_bytes
    finally:
        counter.remove()
    pages = {name: page.clone() for name, page in ours.ddp.gradients.pages(ours.layer.experts)}
    return found, sent, pages, shards.owned(ours.layer.experts), bulk.packed


@pytest.mark.parametrize(
    ("world", "distributed", "wire"),
    [(2, True, "fp32"), (4, False, "fp32"), (4, True, "fp32"), (2, False, "bf16"), (4, True, "bf16")],
)
def test_only_ranks_that_touched_a_page_send_it(pools, world, distributed, wire):
    answers = pools[world].run(reduce_counted, distributed=distributed, wire=wire)
    width = 4 if wire == "fp32" else 2
    members = {e: [r for r in range(world) if any(e in token for token in ROUTES[r])] for e in range(EXPERTS)}
    trips = 0
    for expert, who in members.items():
        if who and distributed:
            owner = next(r for r, answer in enumerate(answers) if (expert, 0) in answer[3])
            trips += len([r for r in who if r != owner])
        elif who:
            trips += len(who) - 1 + world - 1
    mask = world * (world - 1)  # a byte of four bits to each
    assert sum(answer[1] for answer in answers) == trips * EXPERT_NUMEL * width + mask
    touched = {(e, 0) for e, who in members.items() if who}
    packed = sum(answer[4] for answer in answers)
    assert packed > 0 if wire == "bf16" else packed == 0
    for found, _, pages, owned, _ in answers:
        assert found == []
        assert set(pages) == (touched & set(owned) if distributed else touched)
        if not distributed:
            assert all(torch.equal(pages[name], answers[0][2][name]) for name in pages), "copies stay equal"
    if wire == "bf16" and not distributed:
        assert all(torch.equal(page, page.bfloat16().float()) for page in answers[0][2].values())


def sums_in_order(rank: int, world: int) -> float:
    """Rank order decides how four parts are rounded: ((1e8 + 1) - 1e8) + 1."""
    fresh_parallel_state(ep=1)
    side = build(megascale=True)
    side.clear()
    side.forward_backward(tokens(1, seed=0), [[1]])
    gradients, experts = side.ddp.gradients, side.layer.experts
    for _, page in gradients.pages(experts, write=True):
        page.fill_([1e8, 1.0, -1e8, 1.0][rank])
    gradients.finish(group=side.ddp.expt_dp_group)
    (page,) = [page.clone() for _, page in gradients.pages(experts)]
    return float(page[0])


def test_parts_are_added_by_ascending_rank_whoever_adds_them(pools):
    expected = float(((torch.tensor(1e8) + 1.0) - 1e8) + 1.0)
    assert pools[4].run(sums_in_order) == [expected] * 4

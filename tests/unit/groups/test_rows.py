"""Rows, plan and arrival without processes: every token reaches every expert that it chose, once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_omni.groups.functions import segment_sum
from megascale_omni.groups.plan import Demand, TravelCosts, make_groups, make_plan
from megascale_omni.groups.rows import only_expert_counts, pack, received_rows, send_rows, unpack
from megascale_omni.topology.links import LinkCosts


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[torch.Tensor], int]:
    """A routing map for each of some ranks, with rows that chose nothing, one expert or all; local experts."""
    ranks, local = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 9]))
    density = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    counts = draw(st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks))
    maps = [torch.rand(tokens, ranks * local, generator=generator) < density for tokens in counts]
    return maps, local


def demand_of(maps: list[torch.Tensor], ranks: int) -> Demand:
    rows = [send_rows(m, ranks=ranks).rows for m in maps]
    only = [only_expert_counts(m, ranks=ranks).tolist() for m in maps]
    return Demand(np.array([m.sum(0).tolist() for m in maps]), np.array(only), np.array(rows))


@settings(max_examples=150)
@given(routings())
def test_every_token_reaches_every_expert_it_chose_once_and_comes_back_summed(case):
    maps, local = case
    ranks = len(maps)
    sent = [send_rows(m, ranks=ranks) for m in maps]
    values = [torch.arange(m.shape[0] * 2, dtype=torch.float64).view(-1, 2) + 100 * p + 1 for p, m in enumerate(maps)]
    probs = [torch.arange(m.numel(), dtype=torch.float64).view(m.shape) for m in maps]
    home: list[list[torch.Tensor]] = [[] for _ in maps]
    for q in range(ranks):
        pieces = [slice(sum(s.rows[:q]), sum(s.rows[: q + 1])) for s in sent]
        arrived = torch.cat([values[p][s.token_R][pieces[p]] for p, s in enumerate(sent)])
        wire = [probs[p].view(-1)[s.pairs_N][sum(s.pairs[:q]) : sum(s.pairs[: q + 1])] for p, s in enumerate(sent)]
        received = received_rows(torch.cat([s.mask_RB[pieces[p]] for p, s in enumerate(sent)]), local_experts=local)
        x_Nh, probs_N = arrived[received.row_N], torch.cat(wire)[received.wire_N]
        expected_x: list[torch.Tensor] = []
        expected_probs: list[float] = []
        for expert in range(q * local, (q + 1) * local):
            before = len(expected_x)
            for p, m in enumerate(maps):
                for token in m[:, expert].nonzero().view(-1).tolist():
                    expected_x.append(values[p][token])
                    expected_probs.append(float(probs[p][token, expert]))
            assert received.counts[expert - q * local] == len(expected_x) - before
        assert torch.equal(x_Nh, torch.stack(expected_x) if expected_x else values[0].new_zeros(0, 2))
        assert probs_N.tolist() == expected_probs
        back = segment_sum(x_Nh * probs_N.unsqueeze(1), received.segments)
        for p, part in enumerate(back.split([s.rows[q] for s in sent])):
            home[p].append(part)
    for p, m in enumerate(maps):
        total = segment_sum(torch.cat(home[p]), sent[p].segments)
        weights = (probs[p] * m).sum(1, keepdim=True)
        assert torch.equal(total, weights * values[p])


@given(routings(), st.sampled_from(["auto", "tokens", "pages"]), st.integers(1, 10**6))
def test_tables_match_pairwise_and_moves_go_to_ranks_that_need_them(case, move, expert_bytes):
    maps, local = case
    ranks = len(maps)
    demand, owners = demand_of(maps, ranks), np.repeat(np.arange(ranks), local)
    costs = TravelCosts(1000, expert_bytes, LinkCosts.uniform(ranks))
    plan = make_plan(demand, make_groups(demand.counts_PE > 0, owners), costs, move)
    for p, m in enumerate(maps):
        kept = torch.from_numpy(plan.keeps_token_rows)
        assert list(send_rows(m & kept, ranks=ranks).pairs) == plan.pairs_PP[p].tolist()
    for mover in plan.moves:
        assert mover.members == tuple(
            p for p in range(ranks) if p != mover.owner and demand.counts_PE[p, mover.expert] > 0
        )
        assert mover.members
    assert [m.expert for m in plan.moves] == sorted({m.expert for m in plan.moves})
    if move == "pages":
        away = {e for p, e in np.argwhere(demand.counts_PE > 0).tolist() if owners[e] != p}
        assert {m.expert for m in plan.moves} == away
    if move == "tokens":
        assert not plan.moves


@given(routings(), st.integers(1, 20_000))
def test_the_chosen_plan_never_costs_more_than_tokens_alone(case, expert_bytes):
    maps, local = case
    ranks, row_bytes = len(maps), 1000
    demand, owners = demand_of(maps, ranks), np.repeat(np.arange(ranks), local)
    costs = TravelCosts(row_bytes, expert_bytes, LinkCosts.uniform(ranks))
    plan = make_plan(demand, make_groups(demand.counts_PE > 0, owners), costs)

    def bytes_of_rows(masks: list[torch.Tensor]) -> int:
        rows = np.array([send_rows(m, ranks=ranks).rows for m in masks])
        return row_bytes * int(rows.sum() - np.trace(rows))

    kept = [m & torch.from_numpy(plan.keeps_token_rows) for m in maps]
    planned = bytes_of_rows(kept) + expert_bytes * sum(len(m.members) for m in plan.moves)
    assert planned <= bytes_of_rows(maps)


def test_pages_travel_where_many_tokens_need_a_small_expert():
    """Both ways of saving: an expert that tokens chose alone, and all experts of an owner together."""
    owners = np.array([0, 0, 1, 1])
    alone = torch.zeros(100, 4, dtype=torch.bool)
    alone[:, 2] = True
    together = alone.clone()
    together[:, 3] = True
    for chosen, moved in ((alone, [2]), (together, [2, 3])):
        demand = demand_of([chosen, torch.zeros(1, 4, dtype=torch.bool)], 2)
        groups = make_groups(demand.counts_PE > 0, owners)
        plan = make_plan(demand, groups, TravelCosts(1000, 1000 * 40, LinkCosts.uniform(2)))
        assert [m.expert for m in plan.moves] == moved
        assert not make_plan(demand, groups, TravelCosts(1000, 10**6, LinkCosts.uniform(2))).moves


@pytest.mark.parametrize("local", [1, 7, 8, 9, 16, 17])
def test_masks_survive_packing(local):
    mask = torch.rand(5, local) < 0.5
    assert torch.equal(unpack(pack(mask), local), mask)
    assert unpack(pack(mask[:0]), local).shape == (0, local)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_taken_in_fp32_and_rounded_once(dtype):
    mask = torch.ones(1, 9, dtype=torch.bool)
    values = torch.tensor([256.0] + [1.0] * 8).view(9, 1).to(dtype)
    assert segment_sum(values, received_rows(pack(mask), local_experts=9).segments).tolist() == [[264.0]]

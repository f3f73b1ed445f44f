"""Placement: experts that are chosen together on one rank, by level; files; what a new one moves."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_omni.topology.levels import Topology
from megascale_omni.topology.placement import (
    Placement,
    check_slots,
    in_order,
    moves_between,
    pairs_of,
    partition,
    place,
)
from megascale_omni.topology.routing import clusters_of, synthetic


def inside(affinity: np.ndarray, part_E: np.ndarray) -> float:
    return float(affinity[part_E[:, None] == part_E[None, :]].sum())


@given(st.integers(0, 10**6))
@settings(max_examples=30)
def test_parts_are_close_to_the_best_that_there_are(seed):
    affinity = np.random.default_rng(seed).integers(0, 20, size=(6, 6)).astype(float)
    affinity = affinity + affinity.T
    np.fill_diagonal(affinity, 0)
    found = partition(affinity, [2, 2, 2])
    assert np.bincount(found).tolist() == [2, 2, 2]
    best = max(inside(affinity, np.array(p)) for p in set(itertools.permutations([0, 0, 1, 1, 2, 2])))
    assert inside(affinity, found) >= 0.75 * best


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 3, 4]), st.integers(0, 10**6), st.booleans())
@settings(max_examples=60)
def test_each_expert_has_one_rank_and_ranks_have_as_many(ranks, local, seed, known):
    random = np.random.default_rng(seed)
    pairs = random.integers(0, 5, size=(ranks * local, ranks * local))
    topology = Topology.uniform(ranks, per_node=2, per_rack=2)
    counts = random.integers(0, 9, size=(ranks, ranks * local)) if known else None
    slots = place(pairs, ranks=ranks, topology=topology, counts_PE=counts)
    check_slots(slots, "found")
    assert slots == place(pairs, ranks=ranks, topology=topology, counts_PE=counts)


def test_clusters_that_are_chosen_together_get_a_rank_each():
    for experts in (16, 64):
        maps = [synthetic("clusters", tokens=512, experts=experts, topk=2, seed=seed) for seed in range(4)]
        slots = place(np.sum([pairs_of(m) for m in maps], axis=0), ranks=4)
        cluster_E = clusters_of(experts)
        assert [len({int(cluster_E[e]) for e in rank}) for rank in slots] == [1] * 4


def test_what_no_rank_can_hold_stays_in_one_node_and_then_in_one_rack():
    """Eight experts on eight ranks: pairs of ranks a node, pairs of nodes a rack."""
    topology = Topology.uniform(8, per_node=2, per_rack=2)
    pairs = np.zeros((8, 8), dtype=int)
    for a, b, count in [(0, 5, 100), (2, 7, 100), (1, 4, 100), (3, 6, 100), (0, 1, 10), (2, 3, 10)]:
        pairs[a, b] = pairs[b, a] = count
    slots = place(pairs, ranks=8, topology=topology)
    rank_of = {rank[0]: p for p, rank in enumerate(slots)}
    level_PP = topology.level_PP()
    assert all(level_PP[rank_of[a], rank_of[b]] == 0 for a, b in [(0, 5), (2, 7), (1, 4), (3, 6)])
    assert all(level_PP[rank_of[a], rank_of[b]] == 1 for a, b in [(0, 1), (2, 3)])


def test_experts_go_to_the_ranks_whose_tokens_choose_them_inside_a_node():
    counts = np.array([[0, 0, 9, 9], [9, 9, 0, 0]])
    pairs = np.array([[0, 5, 0, 0], [5, 0, 0, 0], [0, 0, 0, 5], [0, 0, 5, 0]])
    assert place(pairs, ranks=2, counts_PE=counts) == ((2, 3), (0, 1))


def test_what_is_there_stays_and_a_new_node_takes_its_share():
    maps = [synthetic("clusters", tokens=512, experts=16, topk=2, seed=s) for s in range(4)]
    pairs: np.ndarray = np.sum([pairs_of(m) for m in maps], axis=0)
    before = tuple(reversed(place(pairs, ranks=4)))
    assert place(pairs, ranks=4, before=before) == before
    assert moves_between(before, before) == []
    after = place(pairs, ranks=8, before=before)
    moves = moves_between(before, after)
    assert {move.target for move in moves} == {4, 5, 6, 7}, "old ranks get nothing new"
    assert len(moves) == 8
    for move in moves:
        assert move.expert in before[move.source]
        assert move.expert in after[move.target]
    fewer = place(pairs, ranks=2, before=before)
    for rank in range(2):
        assert set(before[rank]) <= set(fewer[rank]), "who is still there keeps what it has"
    with pytest.raises(ValueError, match="the placement before is of 8 experts, 16 are to be placed"):
        place(pairs, ranks=4, before=in_order(8, 4))


def test_files_and_what_is_refused(tmp_path):
    placement = Placement({"default": in_order(8, 2), "3": ((0, 2, 4, 6), (1, 3, 5, 7))})
    for name in ("p.yaml", "p.json"):
        placement.write(tmp_path / name, note="for two ranks")
        again = Placement.from_file(tmp_path / name)
        assert again == placement
        assert again.digest == placement.digest
    assert placement.of_layer(3) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert placement.of_layer(None) == placement.of_layer(1) == in_order(8, 2)
    assert Placement({"3": in_order(8, 2)}).of_layer(1) is None
    assert placement.digest != Placement({"default": in_order(8, 2)}).digest
    for text, message in [
        ("{}", "has no mapping experts_of_ranks"),
        ("experts_of_ranks: {default: [[0, 0], [1, 2]]}", "must have each expert once and as many on every rank"),
        ("experts_of_ranks: {default: [[0], [1, 2]]}", "must have each expert once and as many on every rank"),
        ("experts_of_ranks: {default: [[a], [b]]}", "must be a list of experts' numbers for each rank"),
        ("experts_of_ranks: {default: ['01', '23']}", "must be a list of experts' numbers for each rank"),
        ("experts_of_ranks: {default: [[0.5], [1.5]]}", "must be a list of experts' numbers for each rank"),
        ("experts_of_ranks: {default: 3}", "must be a list of experts' numbers for each rank"),
        ("experts_of_ranks: {layer 1: [[0], [1]]}", "give the number of a layer, from 1, or default"),
        ("experts_of_ranks: {0: [[0], [1]]}", "give the number of a layer, from 1, or default"),
        ("experts_of_ranks: {}", "needs at least one module"),
    ]:
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ValueError, match="placement") as error:
            Placement.from_file(tmp_path / "bad.yaml")
        assert message in str(error.value)
    placement.check_layers(3)
    with pytest.raises(
        ValueError, match=r"the placement has layers \[3\], the model has 2: it was planned for another"
    ):
        placement.check_layers(2)
    with pytest.raises(ValueError, match="7 experts cannot be divided among 2 ranks evenly"):
        place(np.zeros((7, 7)), ranks=2)

"""Gossip reaches everyone in ceil(log2 N) rounds; the group cache is bounded and counts."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_omni.groups.cache import GroupCache
from megascale_omni.groups.gossip import gossip_rounds, simulate_gossip


@given(st.integers(1, 70))
def test_all_ranks_agree_after_the_fewest_rounds(size):
    vectors = np.arange(2 * size).reshape(size, 2)
    rounds, knows = simulate_gossip(vectors)
    assert rounds == (math.ceil(math.log2(size)) if size > 1 else 0)
    assert (knows == vectors).all()


@given(st.integers(2, 200))
def test_whom_a_rank_sends_to_hears_from_it(size):
    schedules = [list(gossip_rounds(rank, size)) for rank in range(size)]
    for rank, schedule in enumerate(schedules):
        for number, step in enumerate(schedule):
            assert schedules[step.target][number].source == rank
            assert schedules[step.target][number].count == step.count
    assert sum(step.count for step in schedules[0]) == size - 1


@given(st.lists(st.integers(0, 6), max_size=60), st.integers(1, 4), st.integers(1, 8))
def test_cache_keeps_the_last_used_and_nothing_old(keys, capacity, kept):
    gone: list[int] = []
    cache: GroupCache[int] = GroupCache(capacity, kept_steps=kept, on_evict=gone.append)
    last: dict[int, int] = {}  # in order of last use
    made = hits = 0
    for step, key in enumerate(keys):
        expected = key in last
        value = cache.get(key, step=step, make=partial(int, key))
        assert value == key
        hits += expected
        made += not expected
        last.pop(key, None)
        last[key] = step
        while len(last) > capacity or step - next(iter(last.values())) > kept:
            last.pop(next(iter(last)))
        assert len(cache) == len(last)
    assert (cache.hits, cache.misses) == (hits, made)
    assert len(gone) == made - len(last)
    cache.clear()
    assert len(gone) == made
    assert cache.hit_rate == (hits / len(keys) if keys else 0.0)


def test_a_cache_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"distributed.group_cache=0 must be at least 1 entry"):
        GroupCache(0)

"""Never worse than LRU: whatever the forecast says, page-ins stay within LRU's and a part of one filling."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_omni.paging.budget import Budget
from megascale_omni.paging.outlook import Outlook
from megascale_omni.paging.replay import replay
from megascale_omni.paging.shadow import ShadowLru, slack_of
from tests.unit.paging.test_trace import SLOT, sweeps

NOBODY = {"here": lambda page: False, "pinned": lambda page: False}


@pytest.fixture(autouse=True)
def _little_slack(monkeypatch):
    """A quarter of what are few slots here, and at least one."""
    monkeypatch.setattr("megascale_omni.paging.shadow.LEAST_SLACK", 1)


def shadow_of(slots: int) -> ShadowLru:
    return ShadowLru(lambda: slots)


def used(shadow: ShadowLru, *pages: int, ours: set[int]) -> None:
    shadow.use(pages, here=ours.__contains__, pinned=lambda page: False)


def test_the_shadow_lets_the_page_used_longest_ago_go():
    shadow = shadow_of(2)
    for page in (1, 2, 1, 3):
        shadow.use([page], **NOBODY)
    assert shadow.holds(np.array([1, 2, 3])).tolist() == [True, False, True]
    assert shadow.page_ins == 3


def test_pages_that_are_used_together_or_held_stay():
    shadow = shadow_of(2)
    shadow.use([1, 2], **NOBODY)
    shadow.use([3], here=lambda page: False, pinned=lambda page: page == 1)
    assert shadow.holds(np.array([1, 2, 3])).tolist() == [True, False, True]
    shadow.use([4, 5], **NOBODY)
    assert shadow.holds(np.array([1, 3, 4, 5])).tolist() == [False, False, True, True]


def test_the_allowance_counts_what_lru_lost_and_we_may_lose():
    shadow, ours = shadow_of(4), {1, 2, 3, 4}
    shadow.restart(sorted(ours))
    assert shadow.allowance == slack_of(4) == 1
    used(shadow, 5, ours=ours)  # LRU lets 1 go; we, 2
    assert shadow.allowance == 1, "both bring page 5 in"
    shadow.leave([2])
    shadow.loaded(5)
    ours ^= {2, 5}
    assert shadow.allowance == 0, "page 2 may be wanted, which LRU has"
    used(shadow, 1, ours=ours)  # which LRU does not have any more
    assert shadow.allowance == 2, "and page 2 is what it lost for it"
    assert shadow.page_ins == 2


def test_a_page_that_stays_after_all_costs_nothing():
    shadow = shadow_of(4)
    shadow.restart([1, 2, 3, 4])
    shadow.leave([2])
    shadow.stayed(2)
    assert shadow.allowance == 1
    shadow.drop(3)
    shadow.leave([3])
    assert shadow.allowance == 1, "nobody can want what is gone"


def test_fetching_ahead_needs_an_allowance_where_lru_does_not_have_the_page():
    shadow = shadow_of(4)
    shadow.restart([1, 2, 3, 4])
    shadow.leave([1])
    assert shadow.allowance == 0
    assert not shadow.may_load(9)
    assert shadow.may_load(1), "LRU would not have to fetch it"
    shadow.loaded(1)
    assert shadow.allowance == 0, "but it has not had this page-in"


class Mad:
    """A forecast that says anything."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next_use(self, _: Outlook, page_ids: np.ndarray) -> np.ndarray:
        return np.array([self._random.choice([0.0, 1.0, 5.0, 1e9]) for _ in page_ids])


@settings(max_examples=150, deadline=None)
@given(
    order=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True), min_size=1, max_size=30),
    slots=st.integers(2, 7),
    seed=st.integers(0, 1 << 30),
)
def test_a_mad_forecast_costs_no_more_than_the_slack(order, slots, seed):
    trace = sweeps([sorted(step) for step in order], experts=8)
    budget = Budget(nbytes=slots * SLOT)
    with pytest.MonkeyPatch.context() as patch:
        mad = Mad(seed)
        patch.setattr(Outlook, "next_use", lambda self, pages: mad.next_use(self, pages))
        ours = [replay(trace, policy="ours", budget=budget, prefetch=p).page_ins for p in (True, False)]
    assert max(ours) <= replay(trace, policy="lru", budget=budget).page_ins + slack_of(slots)


def test_without_the_bound_that_forecast_costs_much(monkeypatch):
    trace = sweeps([[0, 1, 2], [3, 4, 5, 6, 7]] * 3 + [[0, 1, 2]] * 60, experts=8)
    budget = Budget(nbytes=5 * SLOT)
    lru = replay(trace, policy="lru", budget=budget).page_ins
    found = {}
    for bound in (True, False):
        mad = Mad(1)
        monkeypatch.setattr(Outlook, "next_use", lambda self, pages, mad=mad: mad.next_use(self, pages))
        if not bound:
            monkeypatch.setattr(ShadowLru, "allowance", property(lambda self: 1 << 30))
        found[bound] = replay(trace, policy="ours", budget=budget).page_ins
    assert found[True] <= lru + slack_of(5) < found[False]

"""The page table: what its rows say, and what it refuses."""

import numpy as np
import pytest

from megascale_omni.paging.planes import PageNumbering
from megascale_omni.paging.table import PageState, PageTable
from megascale_omni.paging.tiers import TierKind


@pytest.fixture
def table() -> PageTable:
    numbering = PageNumbering()
    numbering.register(path="experts", num_experts=2, num_slices=1)
    table = PageTable(numbering)
    table.grow()
    return table


def test_new_pages_are_absent_and_clean(table):
    assert [table.state(i) for i in range(10)] == [PageState.ABSENT] * 10
    assert table.slot.tolist() == [-1] * 10
    assert not table.dirty.any()
    assert not table.pins.any()
    assert not table.last_step.any()


def test_growing_keeps_the_rows_there_are(table):
    table.place(3, tier=TierKind.DEVICE, slot=7)
    table.pin(np.array([3]))
    table.dirty[3], table.last_step[3] = True, 5
    table.numbering.register(path="later", num_experts=1, num_slices=2)
    table.grow()
    assert len(table.tier) == 20
    assert (table.state(3), table.slot[3], table.pins[3], table.dirty[3], table.last_step[3]) == (
        PageState.ACTIVE,
        7,
        1,
        True,
        5,
    )
    assert table.state(19) is PageState.ABSENT


def test_a_removed_page_is_absent_and_clean_again(table):
    table.place(3, tier=TierKind.DEVICE, slot=7)
    table.dirty[3] = True
    assert table.remove(3) == 7
    assert (table.state(3), table.slot[3], table.dirty[3]) == (PageState.ABSENT, -1, False)


def test_a_page_is_placed_once(table):
    table.place(3, tier=TierKind.DEVICE, slot=7)
    with pytest.raises(RuntimeError, match="moment1 page of experts, expert 0, slice 0 is placed twice"):
        table.place(3, tier=TierKind.DEVICE, slot=8)


def test_a_pinned_page_stays_until_its_last_lease_ends(table):
    table.place(5, tier=TierKind.DEVICE, slot=0)
    page = np.array([5])
    table.pin(page)
    table.pin(page)
    table.unpin(page)
    with pytest.raises(RuntimeError, match="weight page of experts, expert 1, slice 0 is removed while 1 leases hold"):
        table.remove(5)
    table.unpin(page)
    table.remove(5)


def test_pins_of_several_pages_are_all_or_none(table):
    table.place(5, tier=TierKind.DEVICE, slot=0)
    with pytest.raises(RuntimeError, match="gradient page of experts, expert 1, slice 0 is leased but absent"):
        table.pin(np.array([5, 6]))
    assert not table.pins.any()


def test_absent_pages_cannot_be_removed_and_unpinned_ones_not_released(table):
    with pytest.raises(RuntimeError, match="is removed but absent"):
        table.remove(0)
    with pytest.raises(RuntimeError, match="released that no lease holds"):
        table.unpin(np.array([0]))
    assert not table.pins.any()

"""Pages that come and go: nothing is lost, read half way, evicted under a lease, loaded twice or kept from an error.

Jobs are made one by one, so that every order of events is the one that a test means.
"""

import numpy as np
import pytest
import torch

from megascale_omni.paging.planes import Plane
from tests.unit.paging.small import SLOT, Pages, one_page_a_batch, resident  # noqa: F401 - a fixture

BOTH = (Plane.WEIGHT, Plane.GRADIENT)


# -- leaving and coming back -------------------------------------------------------------------------------------------


def test_pages_beyond_the_budget_are_on_disk_and_come_back_as_they_were(tmp_path):
    pages = Pages(tmp_path)
    assert len(resident(pages)) == 3
    assert pages.counts["pages_evicted"] == 3
    pages.check()
    pages.check()
    assert pages.used == 3


def test_a_page_read_while_it_is_being_written_stays_and_is_whole(tmp_path):
    pages = Pages(tmp_path)
    leaving = resident(pages)[0]
    written = pages.counts["bytes_written"]
    pages.manager.pager.departures.evict(pages.id(leaving))
    assert next(iter(pages.manager.pager.flights.values())).kind.value == "leaving"
    loaded, evicted = pages.counts.get("pages_loaded", 0), pages.counts["pages_evicted"]
    pages.read(leaving)  # waits for the write
    assert pages.counts["bytes_written"] == written + SLOT
    assert (pages.counts.get("pages_loaded", 0), pages.counts["pages_evicted"]) == (loaded, evicted)
    pages.manager.pager.departures.evict(pages.id(leaving))  # its bytes are on disk already: it goes at once
    assert pages.tier(leaving) == "evicted"
    assert not pages.jobs.pending
    pages.read(leaving)


def test_a_page_written_after_it_was_wanted_back_is_saved_again(tmp_path):
    pages = Pages(tmp_path)
    leaving = resident(pages)[0]
    pages.manager.pager.departures.evict(pages.id(leaving))
    pages.write(leaving, 7.5)
    pages.send_away(leaving)
    assert pages.tier(leaving) == "evicted"
    pages.read(leaving)


def test_nobody_can_write_to_a_page_before_its_write_behind_has_ended(tmp_path):
    pages = Pages(tmp_path)
    leaving = resident(pages)[0]
    pages.manager.pager.departures.evict(pages.id(leaving))
    (future, _, _) = pages.jobs.pending[0]
    with pages.manager.lease(pages.module, Plane.WEIGHT, [leaving]) as lease:
        assert future.done()
        lease.page(leaving, 0).fill_(9.0)
        lease.mark_dirty()
    pages.values[Plane.WEIGHT, leaving] = 9.0
    pages.send_away(leaving)
    pages.read(leaving)


def test_a_clean_page_leaves_without_a_write(tmp_path):
    pages = Pages(tmp_path)
    pages.check()
    written = pages.counts["bytes_written"]
    for _ in range(3):
        pages.check()
    assert pages.counts["bytes_written"] == written


def test_one_page_that_is_wanted_sends_one_clean_page_away(tmp_path):
    pages = Pages(tmp_path, experts=40, slots=32)
    pages.check()
    away = [e for e in range(40) if pages.tier(e) == "evicted"]
    for expert in resident(pages):
        pages.send_away(expert)
    for expert in range(32):
        pages.read(expert)
    assert pages.used == 32
    pages.read(away[-1])
    assert pages.used == 32


# -- prefetch ----------------------------------------------------------------------------------------------------------


def test_a_prefetched_page_is_no_fault_and_is_loaded_once(tmp_path):
    pages = Pages(tmp_path, experts=3)
    pages.send_away(0, 1)
    pages.manager.pager.prefetch([pages.id(0)])
    pages.manager.pager.prefetch([pages.id(0)])
    pages.read(0)
    assert pages.counts["pages_loaded"] == 1
    assert "page_faults" not in pages.counts
    pages.read(1)
    assert (pages.counts["pages_loaded"], pages.counts["page_faults"]) == (2, 1)


def test_a_page_that_lands_while_room_is_made_for_another_is_not_loaded_again(tmp_path):
    pages = Pages(tmp_path, experts=4, slots=3)
    pages.send_away(*resident(pages))
    pages.read(2)
    pages.read(3)
    loaded = pages.counts["pages_loaded"]
    pages.manager.pager.prefetch([pages.id(1)])
    pages.jobs.complete()  # has ended, and the main thread has not looked
    with pages.manager.lease(pages.module, Plane.WEIGHT, [0, 1]) as lease:
        assert [float(lease.page(e, 0)[0]) for e in (0, 1)] == [0.0, 1.0]
        pages.manager.check_integrity()
    assert pages.counts["pages_loaded"] == loaded + 2


def test_a_prefetched_page_that_is_dropped_is_gone_with_its_slot(tmp_path):
    pages = Pages(tmp_path, experts=3)
    pages.send_away(0)
    pages.manager.pager.prefetch([pages.id(0)])
    assert pages.used == 3
    pages.manager.drop(np.array([pages.id(0)]))
    assert (pages.tier(0), pages.used) == ("absent", 2)
    pages.manager.check_integrity()
    pages.create(0)
    pages.check()


def test_a_wanted_page_that_is_dropped_before_its_turn_is_not_loaded(tmp_path):
    pages = Pages(tmp_path, experts=6, slots=3)
    with pages.manager.lease(pages.module, Plane.WEIGHT, resident(pages)):
        away = [e for e in range(6) if pages.tier(e) == "evicted"]
        pages.manager.pager.prefetch([pages.id(e) for e in away])  # there is no room: they wait
        assert not pages.jobs.pending
        pages.manager.drop(np.array([pages.id(away[0])]))
        del pages.values[Plane.WEIGHT, away[0]]
    pages.check()
    assert pages.tier(away[0]) == "absent"


def test_prefetching_never_sends_away_what_is_needed_sooner(tmp_path):
    pages = Pages(tmp_path, experts=6, slots=3)
    manager = pages.manager
    for _ in range(2):  # the second time the forecast knows
        for wave in manager.waves(pages.module, range(6), planes=[Plane.WEIGHT]):
            (expert, _), lease = wave.items[0], wave.leases[Plane.WEIGHT]
            assert float(lease.page(expert, 0)[0]) == expert
            manager.check_integrity()
        manager.schedule.begin_step(manager.schedule.moment.step + 1)
    before = pages.counts["page_faults"]
    for _ in manager.waves(pages.module, range(6), planes=[Plane.WEIGHT]):
        pages.jobs.complete_all()  # io is fast
    assert pages.counts["page_faults"] - before <= 1  # the first page of a visit at most


def test_without_prefetch_nothing_is_loaded_that_nobody_asked_for(tmp_path):
    pages = Pages(tmp_path, prefetch=False)
    for _ in pages.manager.waves(pages.module, range(6), planes=[Plane.WEIGHT]):
        pass
    assert pages.counts["pages_loaded"] == pages.counts["page_faults"]
    assert not pages.jobs.pending


# -- dropping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["on disk", "leaving", "coming", "here"])
def test_a_dropped_gradient_page_never_gives_its_old_bytes_back(tmp_path, where):
    pages = Pages(tmp_path, experts=2, slots=6, planes=BOTH)
    pages.create(1, Plane.GRADIENT)
    page = np.array([pages.id(1, Plane.GRADIENT)])
    if where in ("on disk", "coming"):
        pages.send_away(1, plane=Plane.GRADIENT)
        assert pages.tier(1, Plane.GRADIENT) == "evicted"
    if where == "coming":
        pages.manager.pager.prefetch(page.tolist())
    if where == "leaving":
        pages.manager.pager.departures.evict(int(page[0]))
    pages.manager.drop(page)
    pages.manager.check_integrity()
    assert pages.tier(1, Plane.GRADIENT) == "absent"
    with pytest.raises(RuntimeError, match="gradient page of experts, expert 1, slice 0 is leased but absent"):
        pages.manager.lease(pages.module, Plane.GRADIENT, [1])
    used = pages.used
    assert list(pages.manager.create(pages.module, Plane.GRADIENT, [1])) == page.tolist()
    assert pages.used == used + 1
    with pages.manager.lease(pages.module, Plane.GRADIENT, [1]) as lease:
        assert lease.page(1, 0).isnan().all()  # poison: nothing was brought
    pages.manager.check_integrity()


# -- room --------------------------------------------------------------------------------------------------------------


def test_a_leased_page_does_not_leave_whatever_else_is_wanted(tmp_path):
    pages = Pages(tmp_path)
    with pages.manager.lease(pages.module, Plane.WEIGHT, [0]) as lease:
        address = lease.page(0, 0).data_ptr()
        for _ in range(2):
            for expert in range(1, 6):
                pages.read(expert)
            pages.manager.pager.prefetch([pages.id(e) for e in range(6)])
            pages.jobs.complete_all()
        assert lease.page(0, 0).data_ptr() == address
        assert lease.page(0, 0).equal(torch.zeros_like(lease.page(0, 0)))


def test_pages_held_all_at_once_are_an_error_that_names_the_budget_and_harms_nothing(tmp_path):
    pages = Pages(tmp_path)
    held = pages.manager.lease(pages.module, Plane.WEIGHT, [0, 1, 2])
    message = r"all 3 slots of .* are held by leases at once; a larger --megascale-device-budget is needed"
    with pytest.raises(RuntimeError, match=message):
        pages.manager.lease(pages.module, Plane.WEIGHT, [3])
    with pytest.raises(RuntimeError, match=message):
        pages.manager.create(pages.module, Plane.WEIGHT, [3, 4]) if pages.tier(3) == "absent" else pages.read(3)
    pages.manager.check_integrity()
    held.release()
    pages.check()


def test_more_pages_than_slots_in_one_lease_are_an_error_too(tmp_path):
    pages = Pages(tmp_path)
    with pytest.raises(RuntimeError, match="all 3 slots"):
        pages.manager.lease(pages.module, Plane.WEIGHT, range(4))
    pages.manager.check_integrity()
    assert not pages.manager.table.pins.any()
    pages.check()


def test_pages_are_created_all_or_none(tmp_path):
    pages = Pages(tmp_path, experts=6, slots=4)
    pages.manager.drop(pages.manager.ids(pages.module, Plane.WEIGHT, [0, 1, 2]))
    held = pages.manager.lease(pages.module, Plane.WEIGHT, [4, 5])
    with pytest.raises(RuntimeError, match="all 4 slots"):
        pages.manager.create(pages.module, Plane.WEIGHT, [0, 1, 2])
    assert [pages.tier(e) for e in (0, 1, 2)] == ["absent"] * 3
    assert pages.manager.table.pins.sum() == 2
    pages.manager.check_integrity()
    held.release()
    for expert in (0, 1, 2):
        pages.create(expert)
    pages.check()


def test_room_is_made_from_pages_that_are_on_their_way_here(tmp_path):
    pages = Pages(tmp_path, experts=6, slots=3)
    pages.send_away(*resident(pages))
    pages.manager.pager.prefetch([pages.id(e) for e in (0, 1, 2)])
    assert pages.used == 3
    pages.read(5)
    pages.check()


def test_a_lower_limit_sends_pages_away_and_returns_their_memory(tmp_path):
    pages = Pages(tmp_path, experts=6, slots=6)
    manager = pages.manager
    manager.arena.set_limit(pages.slot_class, 2)
    manager.pager.evict_down(pages.slot_class)
    assert pages.used == 2
    pages.check()
    held = manager.lease(pages.module, Plane.WEIGHT, [0, 1])
    manager.arena.set_limit(pages.slot_class, 1)
    with pytest.raises(RuntimeError, match="all 1 slots"):
        manager.pager.evict_down(pages.slot_class)
    held.release()
    manager.pager.evict_down(pages.slot_class)
    assert pages.used == 1
    pages.check()


def test_settling_ends_all_flights_and_moves_nothing_that_stays(tmp_path):
    pages = Pages(tmp_path)
    stays = resident(pages)[0]
    pages.manager.pager.departures.evict(pages.id(stays))
    pages.manager.pager.settle()
    assert pages.manager.pager.flights == {}
    assert pages.tier(stays) == "active"
    assert not pages.manager.table.dirty[pages.id(stays)]
    pages.check()

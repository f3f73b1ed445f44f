"""Compaction: memory returns to the system, experts lie contiguous, nothing is lost that was asked for meanwhile."""

import threading
from unittest import mock

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_omni.paging import tiers
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.compaction import in_order, moves_in_order, together
from megascale_omni.paging.layout import MIB, ExpertShape, PageLayout
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.paging.memory import FreeMemory
from megascale_omni.paging.planes import NUM_PLANES, Plane
from megascale_omni.paging.upkeep import Upkeep, UpkeepOptions
from scripts.measurements.paging_model import Model, Task, Trained, batches_of, train
from tests.unit.paging.small import SLOT, Pages

TWO_SLICES = PageLayout(ExpertShape(hidden=16, ffn=32, gated=True, bias=False), 16)
WEIGHT, GRADIENT = Plane.WEIGHT, Plane.GRADIENT


@pytest.fixture
def segments_of_four_slots():
    with mock.patch.object(tiers, "SEGMENT_BYTES", 4 * SLOT):
        yield


@settings(max_examples=200, deadline=None)
@given(st.permutations(range(12)), st.permutations(range(12)), st.integers(0, 12), st.sets(st.integers(0, 11)))
def test_moves_bring_every_page_to_its_place_through_free_slots_only(before, after, count, extra):
    pages = range(count)
    places = {page: before[page] for page in pages}
    wanted = {page: after[page] for page in pages}
    others = extra - set(places.values()) - set(wanted.values())  # of pages that stay
    at, taken, spare = dict(places), {*places.values(), *others}, 99
    moves = moves_in_order(places, wanted, spare=spare)
    for page, slot in moves:
        assert slot not in taken
        taken.remove(at[page])
        taken.add(slot)
        at[page] = slot
    assert at == wanted
    assert taken == {*wanted.values(), *others}
    at, taken, runs = dict(places), {*places.values(), *others}, together(moves, places)
    for run in runs:  # all of a run at once: no slot is read and written, none is written twice
        targets = [slot for _, slot in run]
        assert len(set(targets)) == len(run) == len({page for page, _ in run})
        assert taken.isdisjoint(targets)
        taken = (taken - {at[page] for page, _ in run}) | set(targets)
        at.update(run)
    assert at == wanted
    assert sum(map(len, runs)) == len(moves)


def plenty() -> FreeMemory:
    """No emergency."""
    return FreeMemory(1000, 1000)


def scattered(folder, **options) -> Pages:
    """Sixteen experts of two slices and two planes whose pages lie in no order, half of them gone."""
    pages = Pages(folder, experts=16, slots=64, planes=(WEIGHT, GRADIENT), layout=TWO_SLICES, **options)
    for expert in np.random.default_rng(0).permutation(16).tolist():
        pages.create(expert, GRADIENT)
    gone = [1, 2, 5, 6, 7, 8, 12, 15]
    pages.manager.drop(pages.manager.ids(pages.module, GRADIENT, gone))
    for expert in gone:
        del pages.values[GRADIENT, expert]
    pages.send_away(*gone)
    return pages


def places(pages: Pages) -> list[int]:
    """Page ids in the device arena in the order of their slots."""
    table = pages.manager.table
    here = np.nonzero(table.tier == tiers.DEVICE)[0]
    return here[np.argsort(table.slot[here])].tolist()


def test_memory_of_all_segments_that_are_not_needed_returns_and_experts_lie_contiguous(
    tmp_path, segments_of_four_slots
):
    pages = scattered(tmp_path)
    arena, before = pages.manager.arena, pages.manager.arena.bytes_reserved
    used = pages.used
    freed = pages.manager.compact()
    assert freed == before - arena.bytes_reserved > 0
    assert arena.capacity(pages.slot_class) == -(-used // 4) * 4
    found = places(pages)
    assert found == in_order(found)
    # One expert's slices, and the next expert's, lie one behind the other in a plane.
    first = [page_id // NUM_PLANES for page_id in found if page_id % NUM_PLANES == WEIGHT]
    assert first == sorted(first)
    pages.manager.check_integrity()
    assert pages.manager.compact() == 0  # there is nothing more to do
    pages.check()  # which brings segments back
    assert arena.capacity(pages.slot_class) > -(-used // 4) * 4


def test_of_a_full_arena_in_disorder_pages_step_aside(tmp_path, segments_of_four_slots):
    pages = Pages(tmp_path, experts=8, slots=8)
    for expert in (3, 0, 6):  # leave and come back to each other's slots
        pages.send_away(expert)
    for expert in (6, 3, 0):
        pages.read(expert)
    assert places(pages) != in_order(places(pages))
    pages.manager.compact()
    assert places(pages) == in_order(places(pages))
    assert pages.manager.arena.capacity(pages.slot_class) == 8
    pages.check()


def test_requests_wait_for_leases_and_the_end_of_the_step(tmp_path, segments_of_four_slots):
    pages = scattered(tmp_path)
    manager = pages.manager
    manager.schedule.begin_step(1)
    with manager.lease(pages.module, WEIGHT, [9]) as lease:
        page = lease.page(9, 1)
        assert manager.compact() is None
        assert manager.compact() is None  # twice: one compaction serves both
        manager.schedule.end_step()  # somebody still holds a page
        assert pages.counts.get("compactions", 0) == 0
        assert lease.page(9, 1).data_ptr() == page.data_ptr()
    manager.schedule.begin_step(2)
    assert pages.counts["compactions"] == 1
    manager.schedule.end_step()
    assert pages.counts["compactions"] == 1
    pages.check()


def test_what_was_asked_for_ahead_still_comes(tmp_path, segments_of_four_slots):
    """Pages on their way arrive, and those that had no room are asked for still."""
    pages = Pages(tmp_path, experts=8, slots=4)
    pager = pages.manager.pager
    with pages.manager.lease(pages.module, WEIGHT, [0, 1, 2]):
        pager.prefetch([pages.id(expert) for expert in (3, 4, 5, 6, 7)])
        waiting = pager._ahead.waiting()
        assert waiting
    pages.manager.compact()
    assert pager._ahead.waiting() == [p for p in waiting if pager.is_away(p)] != []
    pages.manager.check_integrity()
    pages.check()


def test_pages_that_are_held_stay_and_the_others_move_around_them(tmp_path, segments_of_four_slots):
    pages = scattered(tmp_path)
    with pages.manager.lease(pages.module, WEIGHT, [14]) as lease:
        where = [lease.page(14, s).data_ptr() for s in (0, 1)]
        pages.manager.pager.compact(pages.slot_class, tight=True)
        assert [lease.page(14, s).data_ptr() for s in (0, 1)] == where
        pages.manager.check_integrity()
    pages.check()


def test_another_thread_may_copy_pages_meanwhile(tmp_path, segments_of_four_slots):
    pages = scattered(tmp_path)
    ids = {pages.id(expert): value for (plane, expert), value in pages.values.items() if plane is WEIGHT}
    wrong, done = [], threading.Event()

    def read() -> None:
        while not done.is_set():
            for page_id, value in ids.items():
                if not bool((pages.manager.page_copy(page_id) == value).all()):
                    wrong.append(page_id)

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(20):
        with mock.patch("megascale_omni.paging.compaction.in_order", lambda p, turn=turn: sorted(p, reverse=turn % 2)):
            pages.manager.compact()
    done.set()
    reader.join(timeout=60)
    assert not reader.is_alive()
    assert not wrong
    pages.check()


@pytest.mark.parametrize(
    ("options", "seconds", "expected"),
    [
        (UpkeepOptions(compact_seconds=10.0), 4.0, [0, 0, 1, 1, 1, 2]),
        (UpkeepOptions(compact_percent=20.0), 4.0, [1, 1, 1, 1, 1, 1]),
        (UpkeepOptions(compact_percent=90.0), 4.0, [0, 0, 0, 0, 0, 0]),
        (UpkeepOptions(), 1e6, [0, 0, 0, 0, 0, 0]),
    ],
    ids=["by a timer", "where much is empty", "not where little is", "never by itself"],
)
def test_compaction_comes_at_the_end_of_a_step(tmp_path, segments_of_four_slots, options, seconds, expected):
    pages, now = scattered(tmp_path), [0.0]
    manager = pages.manager
    manager.upkeep = Upkeep(manager, options, probe=plenty, clock=lambda: now[0])
    found = []
    for step in range(1, 7):
        manager.schedule.begin_step(step)
        now[0] += seconds
        manager.schedule.end_step()
        found.append(pages.counts.get("compactions", 0))
    assert found == expected


def ends_of_steps(pages: Pages, count: int, *, percent: float, change=lambda step: None) -> int:
    """Compactions at the ends of so many steps, in each of which ``change`` is made."""
    manager = pages.manager
    manager.upkeep = Upkeep(manager, UpkeepOptions(compact_percent=percent), probe=plenty)
    for step in range(1, count + 1):
        manager.schedule.begin_step(step)
        change(step)
        manager.schedule.end_step()
    return pages.counts.get("compactions", 0)


def test_where_no_segment_would_return_nothing_is_compacted(tmp_path, segments_of_four_slots):
    """Five pages need two segments, though three slots of eight are empty."""
    pages = Pages(tmp_path, experts=5, slots=8)
    assert pages.manager.arena.bytes_reserved == 8 * SLOT
    assert ends_of_steps(pages, 5, percent=1.0) == 0


def test_memory_that_comes_back_at_every_step_returns_ever_less_often(tmp_path, segments_of_four_slots):
    pages = Pages(tmp_path, experts=16, slots=64, planes=(WEIGHT, GRADIENT))

    def step(number: int) -> None:
        for expert in range(16):
            pages.create(expert, GRADIENT)
        pages.manager.drop(pages.manager.ids(pages.module, GRADIENT, range(16)))

    assert 3 <= ends_of_steps(pages, 32, percent=10.0, change=step) <= 7  # at steps 1, 2, 4, 8, 16, 32
    pages.manager.check_integrity()


def test_without_a_word_the_next_step_ends_the_one_before(tmp_path, segments_of_four_slots):
    pages = scattered(tmp_path)
    manager = pages.manager
    manager.upkeep = Upkeep(manager, UpkeepOptions(compact_percent=0.0), probe=plenty)
    manager.schedule.begin_step(1)
    assert pages.counts.get("compactions", 0) == 0
    manager.schedule.begin_step(2)
    assert pages.counts["compactions"] == 1


def test_memory_of_the_process_falls(tmp_path):
    """Also where every page is resident and no budget says how large the arena may be."""
    pages = Pages(
        tmp_path,
        experts=96,
        slots=96,
        layout=PageLayout(ExpertShape(hidden=64, ffn=1024, gated=True, bias=False), 1024),
    )
    gone = np.random.default_rng(0).permutation(96)[:48]
    pages.manager.drop(pages.manager.ids(pages.module, WEIGHT, sorted(gone.tolist())))
    for expert in gone.tolist():
        del pages.values[WEIGHT, expert]
    process = psutil.Process()
    before = process.memory_info().rss
    freed = pages.manager.compact()
    assert freed is not None
    assert freed >= 48 * pages.slot_class.nbytes - 8 * MIB
    assert before - process.memory_info().rss >= 0.92 * freed
    pages.check()


TASK = Task(steps=3, modules=2, experts=6)


@pytest.mark.parametrize("fraction", [1.0, 0.4], ids=["resident", "paged"])
def test_compacting_after_every_step_changes_no_bit_of_a_training(tmp_path, fraction):
    options = PagingOptions(
        device_budget=Budget(fraction=fraction), disk_path=tmp_path, upkeep=UpkeepOptions(compact_percent=0.0)
    )
    found = Trained()
    with batches_of(TASK), mock.patch.object(tiers, "SEGMENT_BYTES", 4 * 8192):
        model = Model(TASK, options)
        for number in range(1, TASK.steps + 1):
            model.step(number, found)
            model.manager.schedule.end_step()
            model.manager.check_integrity()
        model.export(found)
        found.counts = model.manager.stats()
        model.manager.close()
    assert found.counts["compactions"] >= TASK.steps - 1
    assert found.counts["pages_moved"]
    assert not found.differs_from(train(TASK))

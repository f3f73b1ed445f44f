"""When device memory runs out, pages give it back in the order that costs least, and no run stands still for it."""

import logging
import mmap
import resource
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megascale_omni.paging import tiers
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.emergency import (
    CALM_PAUSE,
    LONGEST_PAUSE_SECONDS,
    LOOK_SECONDS,
    ClassState,
    Emergency,
    limits_for,
    limits_raised,
    missing_bytes,
)
from megascale_omni.paging.layout import SlotClass
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.paging.memory import FreeMemory, _of_limits, _table
from megascale_omni.paging.needs import class_needs
from megascale_omni.paging.planes import Plane
from megascale_omni.paging.upkeep import Upkeep, UpkeepOptions
from scripts.measurements.paging_model import Model, Task, Trained, batches_of, train
from tests.unit.paging.small import SLOT, Pages, one_page_a_batch, resident  # noqa: F401

BF16, FP32 = SlotClass(torch.bfloat16, 8192), SlotClass(torch.float32, 8192)
PLENTY = FreeMemory(100, 100)


def test_what_is_missing():
    """Below the share, twice the share is made free."""
    assert missing_bytes(FreeMemory(50, 1000), 0.05) == 0
    assert missing_bytes(FreeMemory(49, 1000), 0.05) == 51
    assert missing_bytes(FreeMemory(0, 1000), 0.05) == 100


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_ranks_that_share_memory_give_back_what_is_missing_together(ranks):
    memory = FreeMemory(49, 1000, sharers=ranks)
    assert 51 <= ranks * missing_bytes(memory, 0.05) < 51 + ranks


STATE = st.builds(
    lambda empty, held, clean, dirty, floor: ClassState(
        capacity=empty + held + clean + dirty, used=held + clean + dirty, floor=floor, clean=clean, dirty=dirty
    ),
    *[st.integers(0, 20)] * 5,
)


@settings(max_examples=300, deadline=None)
@given(STATE, STATE, st.integers(0, 60 * BF16.nbytes))
@example(ClassState(10, 9, 2, 0, 9), ClassState(0, 0, 0, 0, 0), BF16.nbytes // 2)
def test_limits_give_back_what_is_missing_and_keep_floors(one, other, missing):
    states = {BF16: one, FP32: other}
    limits = limits_for(states, missing)
    given_back = can = 0
    for slot_class, state in states.items():
        limit = limits[slot_class]
        assert limit >= max(state.floor, state.used - state.clean - state.dirty)
        least = max(state.floor, state.used - state.clean - state.dirty)
        given_back += max(0, state.capacity - limit) * slot_class.nbytes
        can += max(0, state.capacity - least) * slot_class.nbytes
    assert given_back >= min(missing, can)
    assert given_back <= missing + BF16.nbytes + FP32.nbytes
    # A dirty page leaves only where no clean one is left to.
    wrote = any(limits[c] < s.used - s.clean for c, s in states.items())
    spared = any(limits[c] > max(s.floor, s.used - s.clean) for c, s in states.items())
    assert not (wrote and spared)


@settings(max_examples=100, deadline=None)
@given(*[st.integers(0, 20)] * 4, st.integers(0, 60 * FP32.nbytes))
@example(2, 10, 20, 10, 1)
def test_no_more_is_given_back_than_is_free_whatever_each_class_has(one, other, most, most_of_other, spare):
    limits, budget = {BF16: one, FP32: other}, {BF16: most, FP32: most_of_other}
    raised = limits_raised(limits, budget, spare)
    assert all(limits[c] <= raised[c] <= max(limits[c], budget[c]) for c in limits)
    given_back = sum((raised[c] - limits[c]) * c.nbytes for c in limits)
    lacking = sum(max(0, budget[c] - limits[c]) * c.nbytes for c in limits)
    assert min(spare, lacking) - BF16.nbytes - FP32.nbytes < given_back <= spare or given_back == lacking <= spare


def watched(folder, memory: list[FreeMemory], **options) -> Pages:
    """Eight pages in eight slots; pages 0, 2, 4 and 6 are clean. ``memory[0]`` is what is free."""
    pages = Pages(folder, experts=8, slots=8, **options)
    for expert in (0, 2, 4, 6):
        pages.send_away(expert)
    for expert in (0, 2, 4, 6):
        pages.read(expert)
    pages.jobs.complete_all()
    pages.manager.upkeep = Upkeep(
        pages.manager, UpkeepOptions(emergency_percent=10.0), probe=lambda: memory[0], clock=lambda: pages.now
    )
    return pages


def short_of(slots: int) -> FreeMemory:
    """Memory of which so many slots are missing to twice 10 %."""
    return FreeMemory(0, 5 * slots * SLOT)


@pytest.mark.usefixtures("one_page_a_batch")
class TestPages:
    """One page a slot, a slot a segment."""

    @pytest.fixture(autouse=True)
    def small_segments(self):
        with mock.patch.object(tiers, "SEGMENT_BYTES", SLOT):
            yield

    def test_clean_pages_are_dropped_without_a_write(self, tmp_path):
        pages = watched(tmp_path, [short_of(3)])
        before = pages.counts
        pages.manager.upkeep.look()
        assert pages.jobs.pending == []
        assert len(resident(pages)) == 5
        assert {1, 3, 5, 7} < set(resident(pages))
        assert pages.counts["bytes_written"] == before["bytes_written"]
        assert pages.counts["emergency_pages"] == 3
        assert pages.manager.arena.bytes_reserved == 5 * SLOT
        pages.check()

    def test_then_dirty_ones_are_written_back(self, tmp_path):
        pages = watched(tmp_path, [short_of(6)])
        before = pages.counts["bytes_written"]
        pages.manager.upkeep.look()
        assert len(resident(pages)) == 2
        assert set(resident(pages)) < {1, 3, 5, 7}
        assert pages.counts["bytes_written"] == before + 2 * SLOT
        pages.manager.check_integrity()
        pages.check()

    def test_held_pages_and_two_of_a_class_stay(self, tmp_path):
        pages = watched(tmp_path, [short_of(100)])
        with pages.manager.lease(pages.module, Plane.WEIGHT, [0, 3, 5]) as lease:
            pointers = [lease.page(e, 0).data_ptr() for e in (0, 3, 5)]
            pages.manager.upkeep.look()
            assert resident(pages) == [0, 3, 5]
            assert [lease.page(e, 0).data_ptr() for e in (0, 3, 5)] == pointers
        pages.now += LOOK_SECONDS
        pages.manager.upkeep.look()
        assert len(resident(pages)) == 2
        pages.check()

    def test_memory_that_nobody_uses_goes_first(self, tmp_path):
        pages = watched(tmp_path, [short_of(2)])
        pages.manager.drop(pages.manager.ids(pages.module, Plane.WEIGHT, [1, 4]))
        before = pages.counts["pages_evicted"]
        pages.manager.upkeep.look()
        assert pages.counts["pages_evicted"] == before
        assert pages.manager.arena.bytes_reserved == 6 * SLOT

    def test_it_is_looked_at_seldom(self, tmp_path):
        memory = [FreeMemory(15, 100)]
        pages = watched(tmp_path, memory)
        pages.manager.upkeep.look()
        memory[0] = short_of(3)
        pages.now += LOOK_SECONDS / 2
        pages.manager.upkeep.look()
        assert len(resident(pages)) == 8
        pages.now += LOOK_SECONDS / 2
        pages.manager.upkeep.look()
        assert len(resident(pages)) == 5

    def test_and_more_seldom_where_much_is_free(self, tmp_path):
        memory = [PLENTY]
        pages = watched(tmp_path, memory)
        pages.manager.upkeep.look()
        memory[0] = short_of(3)
        pages.now += LOOK_SECONDS
        pages.manager.upkeep.look()
        assert len(resident(pages)) == 8
        pages.now += LOOK_SECONDS * (CALM_PAUSE - 1)
        pages.manager.upkeep.look()
        assert len(resident(pages)) == 5

    def test_where_others_keep_memory_full_pages_are_not_moved_about_for_nothing(self, tmp_path, monkeypatch):
        memory = [short_of(6)]
        pages = watched(tmp_path, memory)
        pager, looks, seconds = pages.manager.pager, list[float](), 60.0
        pages.manager.upkeep.look()  # what can be given is given
        assert len(resident(pages)) == 2
        emergency = pages.manager.upkeep.emergency
        states = emergency.states

        def looked_at() -> dict[SlotClass, ClassState]:
            looks.append(pages.now)
            return states()

        monkeypatch.setattr(emergency, "states", looked_at)
        with mock.patch.object(pager, "compact", side_effect=AssertionError("for nothing")):
            for _ in range(int(seconds / LOOK_SECONDS)):
                pages.now += LOOK_SECONDS
                pages.manager.upkeep.look()
        assert 2 < len(looks) <= 4 + seconds / LONGEST_PAUSE_SECONDS + 4  # doubling up to the longest pause
        memory[0] = FreeMemory(15, 100)
        pages.now += LONGEST_PAUSE_SECONDS
        pages.manager.upkeep.look()  # it is over: from now on every look counts again
        memory[0] = short_of(6)
        pages.now += LOOK_SECONDS
        looked = len(looks)
        pages.manager.upkeep.look()
        assert len(looks) == looked + 1
        pages.check()

    def test_ranks_of_one_machine_take_their_part_of_what_is_free_again(self, tmp_path):
        memory = [short_of(6)]
        pages = watched(tmp_path, memory)
        manager = pages.manager
        manager.options = PagingOptions(device_budget=Budget(nbytes=8 * SLOT), disk_path=tmp_path)
        manager.upkeep.look()
        assert manager.arena.limit(pages.slot_class) == 2
        memory[0] = FreeMemory(20 * SLOT + 4 * SLOT, 100 * SLOT, sharers=2)  # four slots more than twice 10 %
        manager.upkeep.emergency.relax()
        assert manager.arena.limit(pages.slot_class) == 4

    def test_pages_get_their_budget_back_when_memory_is_free_again(self, tmp_path, caplog):
        memory = [short_of(6)]
        pages = watched(tmp_path, memory)
        manager = pages.manager
        manager.options = PagingOptions(device_budget=Budget(nbytes=8 * SLOT), disk_path=tmp_path)
        with caplog.at_level(logging.INFO):
            manager.upkeep.look()
            pages.now += LOOK_SECONDS
            manager.upkeep.look()  # still so: it is said once
        said = [record.message for record in caplog.records if "is free: pages give" in record.message]
        assert len(said) == 1
        assert "less than 10 % of device memory is free" in said[0]
        assert manager.arena.limit(pages.slot_class) == 2
        memory[0] = FreeMemory(20 * SLOT + 3 * SLOT, 100 * SLOT)  # three slots more than twice 10 %
        manager.upkeep.emergency.relax()
        assert manager.arena.limit(pages.slot_class) == 5
        manager.upkeep.emergency.relax()  # what may be taken and was not yet is not given twice
        assert manager.arena.limit(pages.slot_class) == 5
        pages.check()
        memory[0] = FreeMemory(90 * SLOT, 100 * SLOT)
        with caplog.at_level(logging.INFO):
            manager.upkeep.emergency.relax()
        assert manager.arena.limit(pages.slot_class) == 8
        assert "is free again" in caplog.records[-1].message
        pages.check()

    @pytest.mark.parametrize("slots", [8, 2])
    def test_host_memory_of_the_same_machine_shrinks_as_well(self, tmp_path, slots):
        """Without an accelerator, pages that left for host memory would have freed nothing. Two slots are the least."""
        memory = [short_of(100)]
        pages = watched(tmp_path, memory, host_slots=4)
        manager = pages.manager
        manager.options = PagingOptions(
            device_budget=Budget(nbytes=slots * SLOT), host_budget=Budget(nbytes=4 * SLOT), disk_path=tmp_path
        )
        pages.send_away(1, 3)
        manager.shares.apply()
        host = manager.pager.tiers.host
        assert host.bytes_reserved
        manager.upkeep.look()
        assert host.used(pages.slot_class) == host.limit(pages.slot_class) == host.bytes_reserved == 0
        pages.check()
        memory[0] = FreeMemory(90 * SLOT, 100 * SLOT)
        manager.upkeep.emergency.relax()
        assert host.limit(pages.slot_class) == 4
        pages.check()


TASK = Task(steps=4, modules=2, experts=6)


def trained_in_emergencies(folder, task: Task, *, every: int, fraction: float) -> Trained:
    """A training in which every so many looks find no memory free, whatever the time."""
    looks = 0

    def memory() -> FreeMemory:
        nonlocal looks
        looks += 1
        return PLENTY if looks % every else FreeMemory(0, 1 << 40)

    found = Trained()
    options = PagingOptions(
        device_budget=Budget(fraction=fraction), disk_path=folder, upkeep=UpkeepOptions(emergency_percent=5.0)
    )
    with batches_of(task), mock.patch("megascale_omni.paging.emergency.LOOK_SECONDS", 0.0):
        model = Model(task, options, memory=memory)
        try:
            for number in range(1, task.steps + 1):
                model.step(number, found)
                model.manager.check_integrity()
            model.export(found)
            found.counts = model.manager.stats()
        finally:
            model.manager.close()
    assert looks > 2 * every
    return found


@pytest.mark.parametrize(
    ("task", "every", "fraction"),
    [(TASK, 3, 1.0), (TASK, 1, 0.6), (Task(steps=4, modules=2, experts=6, clip=0.0, recompute=True), 2, 1.0)],
    ids=["now and then", "always", "stepped in the backward, with recompute"],
)
def test_emergencies_change_no_bit_of_a_training(tmp_path, task, every, fraction):
    found = trained_in_emergencies(tmp_path, task, every=every, fraction=fraction)
    assert found.counts["emergencies"]
    assert found.counts["emergency_pages"]
    assert not found.differs_from(train(task))


def limit_of_this_process() -> FreeMemory:
    """Of what the system says, what this process's own limits leave: other processes are no matter of this test."""
    return min(_of_limits(), key=lambda reading: reading.share, default=FreeMemory(1 << 40, 1 << 40))


def test_a_process_at_its_limit_trains_on_with_a_smaller_arena(tmp_path):
    """The real limit of this process, read from the system: what else takes memory leaves less than 5 % of it."""
    expected, found = Trained(), Trained()
    options = PagingOptions(
        device_budget=Budget(fraction=1.0), disk_path=tmp_path, upkeep=UpkeepOptions(emergency_percent=5.0)
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    task = Task(steps=4, modules=2, experts=16, hidden=64, ffn=256, rows=256, batch_bytes=1 << 18, blas=False)
    with batches_of(task), mock.patch("megascale_omni.paging.emergency.LOOK_SECONDS", 0.0):
        alone, model = Model(task, PagingOptions()), Model(task, options, memory=limit_of_this_process)
        for number in range(1, task.steps + 1):
            alone.step(number, expected)
        model.step(1, found)
        whole = model.manager.arena.bytes_reserved
        used = _table("/proc/self/status", ("VmData",))["VmData"]
        resource.setrlimit(resource.RLIMIT_DATA, (int(used * 1.2), hard))
        held = None
        try:
            assert limit_of_this_process().total_bytes == int(used * 1.2)
            model.step(2, found)
            assert "emergencies" not in model.manager.stats()
            # Something else takes nearly all that is left.
            held = mmap.mmap(-1, int(used * 0.16), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            model.step(3, found)
            assert model.manager.arena.bytes_reserved < whole
            assert model.manager.stats()["emergency_pages"]
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
            if held is not None:
                held.close()
        model.step(4, found)
        assert not model.manager.upkeep.emergency.lowered  # there is enough again
        model.manager.close()
    assert found.losses == expected.losses


def test_floors_are_those_of_a_run_that_starts_with_so_little(tmp_path):
    with batches_of(TASK):
        model = Model(TASK, PagingOptions(device_budget=Budget(fraction=1.0), disk_path=tmp_path))
        needs = class_needs(model.manager.modules)
        watch = Emergency(model.manager, least=0.05, probe=lambda: FreeMemory(0, 1 << 40), clock=lambda: 0.0)
        model.step(1, Trained())
        watch.look()
        assert {c: model.manager.arena.limit(c) for c in needs} == {c: need.floor for c, need in needs.items()}
        model.manager.close()

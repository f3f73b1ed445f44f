"""Segments beside an accelerator: large, so that pages lie together; within the budget, so that they may."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale_omni.paging import manager as managers
from megascale_omni.paging import segments, tiers
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.copies import JOINED_BYTES, StreamCopier, portions
from megascale_omni.paging.layout import MIB, SlotClass
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.paging.memory import FreeMemory
from megascale_omni.paging.segments import LARGE_SEGMENT_BYTES, OF_CAPACITY, largest_segment, slots_to_add
from megascale_omni.paging.tiers import SEGMENT_BYTES, Arena
from scripts.measurements.paging_model import Model, Task, Trained, batches_of, train
from tests.unit.paging.late_streams import LateStreams
from tests.unit.paging.movers import ManualMover
from tests.unit.paging.small import SLOT, one_page_a_batch  # noqa: F401
from tests.unit.paging.test_emergency import watched

PAGE = SlotClass(torch.bfloat16, 8 * MIB)  # 16 MiB, the default
META = torch.device("meta")


def test_ordinary_memory_has_small_segments_and_an_accelerator_large_ones():
    assert largest_segment(torch.device("cpu")) is None
    assert largest_segment(torch.device("cuda")) == LARGE_SEGMENT_BYTES == 16 * PAGE.nbytes


@given(st.integers(1, 4000), st.sampled_from([MIB // 4, 3 * MIB, 16 * MIB, 64 * MIB]))
def test_an_arena_has_at_no_time_more_than_its_limit_and_few_segments(limit, nbytes):
    capacity, sizes = 0, []
    while capacity < limit:
        more = slots_to_add(
            nbytes=nbytes, capacity=capacity, limit=limit, small=SEGMENT_BYTES, largest=LARGE_SEGMENT_BYTES
        )
        assert 1 <= more * nbytes <= max(LARGE_SEGMENT_BYTES, nbytes)
        capacity += more
        sizes.append(more)
    assert capacity == limit
    assert len(set(sizes[:-1])) <= 1, "all but the last are as large as they may be"


@given(st.integers(0, 4000), st.sampled_from([MIB // 4, 3 * MIB, 16 * MIB, 64 * MIB]))
def test_without_a_limit_little_lies_empty(capacity, nbytes):
    more = slots_to_add(nbytes=nbytes, capacity=capacity, limit=None, small=SEGMENT_BYTES, largest=LARGE_SEGMENT_BYTES)
    assert 1 <= more <= max(1, SEGMENT_BYTES // nbytes, capacity // OF_CAPACITY)


def test_slots_of_short_segments_are_told_apart_and_their_memory_returns():
    arena = Arena(device=META, largest=LARGE_SEGMENT_BYTES)
    arena.set_limit(PAGE, 75)  # 16 segments at most, of 4, 4, ... slots; the last one has 3
    slots = [arena.allocate(PAGE) for _ in range(75)]
    assert not arena.has_room(PAGE)
    assert arena.bytes_reserved == 75 * PAGE.nbytes
    assert len(set(slots)) == 75
    assert all(arena.tensor(PAGE, slot).shape == (PAGE.stride,) for slot in slots)
    arena.check_integrity()
    for slot in slots[4:12]:
        arena.free(PAGE, slot)
    arena.set_limit(PAGE, 70)
    assert arena.trim(PAGE) == 4 * PAGE.nbytes
    assert arena.capacity(PAGE) == 71
    arena.set_limit(PAGE, arena.in_whole_segments(PAGE, 69))
    assert arena.trim(PAGE) == 4 * PAGE.nbytes
    assert arena.capacity(PAGE) == 67
    arena.check_integrity()
    arena.set_limit(PAGE, 75)
    again = [arena.allocate(PAGE) for _ in range(8)]
    assert set(again) <= set(slots)
    assert arena.bytes_reserved == 75 * PAGE.nbytes


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("largest", "copies"), [(None, 32), (16 * SLOT, 2)])
def test_pages_that_lie_together_on_both_sides_are_one_copy(largest, copies):
    """Pages of more than half a small segment, as those of 16 MiB are: each is a segment of its own in small ones."""
    slot_class, streams = SlotClass(torch.float32, SLOT // 4), LateStreams()
    with mock.patch.object(tiers, "SEGMENT_BYTES", SLOT):
        host, device = (Arena(device=torch.device("cpu"), largest=largest) for _ in range(2))
        for arena in (host, device):
            arena.set_limit(slot_class, 256)  # of which a segment is a 16th
        pairs = [tuple(a.tensor(slot_class, a.allocate(slot_class)) for a in (host, device)) for _ in range(32)]
    for number, (source, target) in enumerate(pairs):
        source.fill_(number)
        target.zero_()
    copier = StreamCopier(streams)
    copier.load(pairs)  # type: ignore[arg-type]
    copier.settle()
    assert all(bool((target == number).all()) for number, (_, target) in enumerate(pairs))
    assert [len(copied.pairs) for copied in streams.copies] == [copies]


def test_who_waits_for_the_first_of_many_copies_does_not_wait_for_all():
    pages = [torch.empty(4 * MIB, dtype=torch.float32, device=META) for _ in range(11)]
    found = portions([(page, page) for page in pages])
    assert [len(portion) * 16 * MIB <= JOINED_BYTES for portion in found] == [True] * 3
    assert [pair[0] for portion in found for pair in portion] == pages


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def large_segments(monkeypatch):
    monkeypatch.setattr(tiers, "SEGMENT_BYTES", SLOT)
    monkeypatch.setattr(segments, "OF_LIMIT", 2)
    monkeypatch.setattr(managers, "largest_segment", lambda device: 8 * SLOT)


@pytest.mark.usefixtures("large_segments")
def test_tiers_of_large_segments_change_no_bit_and_stay_within_their_budgets(tmp_path):
    task, found = Task(modules=2, experts=6, active=4, steps=4, clip=0.0), Trained()
    with batches_of(task):
        options = PagingOptions(Budget(fraction=0.4), Budget(fraction=0.5), tmp_path, checksum="crc32")
        model = Model(task, options, ManualMover(3), copier=StreamCopier(LateStreams(3)))
        manager = model.manager
        for number in range(1, task.steps + 1):
            model.step(number, found)
            manager.check_integrity()
            for arena in (manager.arena, manager.pager.tiers.host):
                for slot_class in arena.slot_classes():
                    left = 8 if number > 1 else 0  # of a segment in which there are pages still
                    assert arena.capacity(slot_class) <= (arena.limit(slot_class) or 0) + left
            if number < 3:
                manager.resize(Budget(fraction=0.3), host=Budget(fraction=0.3))
                manager.compact()
        model.export(found)
        manager.close()
    assert not found.differs_from(train(task))


@pytest.mark.usefixtures("one_page_a_batch", "large_segments")
def test_an_emergency_gives_whole_segments_back(tmp_path):
    memory = [FreeMemory(0, 5 * SLOT)]  # one slot is missing
    pages = watched(tmp_path, memory)
    assert pages.manager.arena.bytes_reserved == 8 * SLOT
    pages.manager.upkeep.look()
    assert pages.manager.arena.bytes_reserved == 4 * SLOT, "a segment of four slots"
    pages.manager.check_integrity()
    pages.check()

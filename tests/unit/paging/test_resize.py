"""The arena becomes smaller and larger while pages are used; memory returns, bytes and results stay."""

import errno
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_omni.paging import tiers
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.layout import MIB, ExpertShape, PageLayout, SlotClass
from megascale_omni.paging.manager import ExpertManager, PagingOptions
from megascale_omni.paging.planes import Plane
from megascale_omni.paging.tiers import Arena
from scripts.measurements.paging_model import Model, Task, Trained, batches_of, smallest_budget_of, train
from tests.unit.paging.small import CPU, SLOT, Pages

CLASS = SlotClass(torch.float32, SLOT // 4)


@pytest.fixture(autouse=True)
def segments_of_four_slots():
    with mock.patch.object(tiers, "SEGMENT_BYTES", 4 * SLOT):
        yield


def arena(taken: set[int], *, limit: int) -> Arena:
    """An arena in which these slots are taken."""
    found = Arena(device=CPU)
    for _ in range(max(taken, default=0) + 1):
        found.allocate(CLASS)
    for slot in set(found.taken_slots(CLASS)) - taken:
        found.free(CLASS, slot)
    found.set_limit(CLASS, limit)
    return found


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, 39)), st.integers(0, 45), st.sets(st.integers(0, 39)))
def test_moves_empty_as_many_segments_as_can_be(taken, limit, fixed):
    fixed &= taken
    found = arena(taken, limit=limit)
    for source, target in found.moves_to_compact(CLASS, fixed):
        assert source not in fixed
        found.take(CLASS, target)
        found.free(CLASS, source)
    found.trim(CLASS)
    found.check_integrity()
    assert found.used(CLASS) == len(taken)
    assert fixed <= set(found.taken_slots(CLASS))
    needed = max(-(-max(limit, len(taken)) // 4), len({slot // 4 for slot in fixed}))
    assert found.capacity(CLASS) <= 4 * needed


def test_a_slot_that_is_not_free_cannot_be_taken():
    found = arena({0}, limit=4)
    with pytest.raises(RuntimeError, match=r"slot 0 of .* is not free"):
        found.take(CLASS, 0)
    found.take(CLASS, 2)
    assert found.allocate(CLASS) == 1
    found.check_integrity()


def test_pages_keep_their_bytes_through_every_size(tmp_path):
    pages = Pages(tmp_path, experts=24, slots=24)
    for slots in (24, 12, 7, 3, 20, 5, 24):
        pages.manager.arena.set_limit(pages.slot_class, slots)
        pages.manager.pager.evict_down(pages.slot_class)
        pages.manager.pager.compact(pages.slot_class)
        pages.manager.check_integrity()
        assert pages.used <= slots
        assert pages.manager.arena.bytes_reserved <= -(-slots // 4) * 4 * SLOT
        pages.check()


def test_a_page_that_is_held_stays_and_its_views_stay_true(tmp_path):
    pages = Pages(tmp_path, experts=24, slots=24)
    with pages.manager.lease(pages.module, Plane.WEIGHT, [21]) as lease:
        page = lease.page(21, 0)
        pages.manager.arena.set_limit(pages.slot_class, 4)
        pages.manager.pager.evict_down(pages.slot_class)
        pages.manager.pager.compact(pages.slot_class)
        pages.manager.check_integrity()
        assert lease.page(21, 0).data_ptr() == page.data_ptr()
        assert page[0] == pages.values[Plane.WEIGHT, 21]
    pages.manager.pager.compact(pages.slot_class)
    assert pages.manager.arena.bytes_reserved <= 4 * SLOT
    pages.check()


# -- of a whole manager ------------------------------------------------------------------------------------------------

TASK = Task(steps=6, modules=2, experts=6)


def trained_with(tmp_path, sizes: dict[int, float], *, in_lease: bool = False) -> Trained:
    """A training whose budget becomes ``sizes[step]`` (fraction of all pages) before that step."""
    found = Trained()
    with batches_of(TASK):
        model = Model(TASK, PagingOptions(device_budget=Budget(fraction=1.0), disk_path=tmp_path))
        try:
            for number in range(1, TASK.steps + 1):
                if number in sizes:
                    experts = model.modules[0]
                    if in_lease:
                        with experts.lease(Plane.WEIGHT, [(0, 0)]):
                            model.manager.resize(Budget(fraction=0.9))
                            model.manager.resize(Budget(fraction=sizes[number]))
                    else:
                        model.manager.resize(Budget(fraction=sizes[number]))
                model.step(number, found)
                model.manager.check_integrity()
                if number in sizes:
                    total = sum(
                        m.entry.num_pages * m.slot_class(p).nbytes for m in model.manager.modules for p in m.dtypes
                    )
                    assert model.manager.arena.bytes_used <= sizes[number] * total + 1
            model.export(found)
            found.counts = model.manager.stats()
        finally:
            model.manager.close()
    return found


@pytest.mark.parametrize("in_lease", [False, True], ids=["at once", "queued"])
def test_resizing_changes_no_bit_of_a_training(tmp_path, in_lease):
    found = trained_with(tmp_path, {2: 0.5, 3: 0.3, 5: 0.8}, in_lease=in_lease)
    assert found.counts["pages_evicted"]
    assert found.counts["pages_loaded"]
    assert not found.differs_from(train(TASK))


def test_sizes_that_do_not_work_are_refused_and_nothing_changes(tmp_path):
    with batches_of(TASK):
        resident, paged = (
            Model(TASK, PagingOptions()),
            Model(TASK, PagingOptions(Budget(fraction=1.0), disk_path=tmp_path)),
        )
        with pytest.raises(ValueError, match="start it with --megascale-device-budget"):
            resident.manager.resize(Budget(fraction=0.5))
        before = paged.manager.options
        with pytest.raises(ValueError, match=rf"use --megascale-device-budget {smallest_budget_of(TASK)} or more"):
            paged.manager.resize(Budget(nbytes=1))
        assert paged.manager.options == before
        paged.manager.close()


def test_a_budget_whose_pages_the_disk_cannot_hold_is_refused_at_once_though_pages_are_held(tmp_path, monkeypatch):
    """And not when the step has ended, where nobody asked."""
    monkeypatch.setattr("megascale_omni.paging.batches.BATCH_BYTES", 1)
    options = PagingOptions(device_budget=Budget(fraction=1.0), disk_path=tmp_path)
    manager = ExpertManager(device=CPU, options=options)
    layout = PageLayout.for_page_bytes(
        ExpertShape(hidden=64, ffn=64, gated=False, bias=False), page_bytes=64 * 1024, dtype=torch.float32
    )
    module = manager.add_module(path="m", layout=layout, num_experts=12, dtypes={Plane.WEIGHT: torch.float32})
    manager.create(module, Plane.WEIGHT, range(12))
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with mock.patch("os.posix_fallocate", full), manager.lease(module, Plane.WEIGHT, [0]):
        with pytest.raises(ValueError, match="has no room for the experts' pages"):
            manager.resize(Budget(fraction=0.5))
        manager.schedule.end_step()
    manager.schedule.end_step()
    assert full.called
    assert manager.arena.limit(module.slot_class(Plane.WEIGHT)) == 12
    manager.close()


def test_memory_of_the_process_falls(tmp_path):
    """By 92 % at least of what the arena gives up, though its pages were used in no order."""
    layout = PageLayout(ExpertShape(hidden=64, ffn=1024, gated=True, bias=False), 1024)  # 768 KiB
    with mock.patch.object(tiers, "SEGMENT_BYTES", 8 * MIB):
        pages = Pages(tmp_path, experts=128, slots=128, layout=layout)
        generator = np.random.default_rng(0)
        for expert in generator.permutation(128)[:64].tolist():
            pages.read(expert)
        process = psutil.Process()
        before, reserved = process.memory_info().rss, pages.manager.arena.bytes_reserved
        pages.manager.arena.set_limit(pages.slot_class, 64)
        pages.manager.pager.evict_down(pages.slot_class)
        pages.manager.pager.compact(pages.slot_class)
        given_up = reserved - pages.manager.arena.bytes_reserved
        assert given_up >= 0.92 * 64 * pages.slot_class.nbytes
        assert before - process.memory_info().rss >= 0.92 * given_up
        pages.check()

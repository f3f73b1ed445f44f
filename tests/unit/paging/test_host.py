"""Host memory between device and disk: who stays there, who sinks, and that nothing is lost when it shrinks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest
import torch

from megascale_omni.paging.budget import Budget
from megascale_omni.paging.disk import PageIoError
from megascale_omni.paging.flights import FlightKind
from megascale_omni.paging.layout import ExpertShape, PageLayout
from megascale_omni.paging.manager import ExpertManager, PagingOptions
from megascale_omni.paging.planes import Plane
from scripts.measurements.paging_model import Model, Task, Trained, batches_of, train
from tests.unit.paging.small import SLOT, Pages


def settled(pages: Pages) -> Pages:
    pages.jobs.complete_all()
    pages.manager.pager.poll()
    return pages


def tiers(pages: Pages, experts: int) -> list[str]:
    return [pages.tier(expert) for expert in range(experts)]


def test_a_page_goes_to_host_memory_while_there_is_room_and_then_to_disk(tmp_path):
    pages = settled(Pages(tmp_path, experts=6, slots=2, host_slots=2))
    assert sorted(tiers(pages, 6)) == ["active"] * 2 + ["cold"] * 2 + ["evicted"] * 2
    pages.check()
    pages.manager.check_integrity()


def test_a_page_is_in_one_tier_only(tmp_path):
    pages = settled(Pages(tmp_path, experts=4, slots=2, host_slots=2))
    host = pages.manager.pager.tiers.host
    for _ in range(3):
        for expert in range(4):
            pages.read(expert)
            settled(pages)
            assert host.used(pages.slot_class) == tiers(pages, 4).count("cold") <= 2
    pages.manager.check_integrity()


def test_clean_pages_that_are_needed_later_make_room_at_once(tmp_path):
    pages = settled(Pages(tmp_path, experts=6, slots=2, host_slots=2))
    table = pages.manager.table
    pages.manager.outlook.next_use = lambda ids: -table.last_use[ids].astype(float)  # type: ignore[method-assign, assignment]
    for _ in range(2):  # every page has been on disk, and is clean
        for expert in range(6):
            pages.read(expert)
            settled(pages)
    manager, written = pages.manager, pages.counts["bytes_written"]
    for expert in range(6):
        pages.read(expert)
        settled(pages)
    assert pages.counts["bytes_written"] == written, "nothing was written again"
    assert pages.counts["pages_sunk"] > 0
    manager.check_integrity()
    pages.check()


def test_a_dirty_page_that_sinks_is_written_once_and_found_again(tmp_path):
    pages = settled(Pages(tmp_path, experts=4, slots=1, host_slots=1))
    before = pages.counts["bytes_written"]
    host = pages.manager.pager.host
    (cold,) = [e for e in range(4) if pages.tier(e) == "cold"]
    pages.manager.table.dirty[pages.id(cold)] = True
    host._sink(pages.id(cold))
    flights = pages.manager.pager.flights
    assert {page: flight.kind for page, flight in flights.items()} == {pages.id(cold): FlightKind.SINKING}
    pages.manager.check_integrity()
    settled(pages)
    assert pages.tier(cold) == "evicted"
    assert pages.counts["bytes_written"] == before + SLOT
    pages.check()


def test_a_page_that_is_wanted_while_it_sinks_is_brought_and_right(tmp_path):
    pages = settled(Pages(tmp_path, experts=4, slots=2, host_slots=1))
    (cold,) = [e for e in range(4) if pages.tier(e) == "cold"]
    pages.manager.table.dirty[pages.id(cold)] = True
    pages.manager.pager.host._sink(pages.id(cold))
    pages.read(cold)  # compares its bytes
    assert pages.tier(cold) == "active"
    assert not pages.manager.table.dirty[pages.id(cold)], "it is on disk now"
    pages.manager.check_integrity()


def test_a_page_can_be_dropped_while_it_sinks(tmp_path):
    pages = settled(Pages(tmp_path, experts=4, slots=2, host_slots=1))
    (cold,) = [e for e in range(4) if pages.tier(e) == "cold"]
    pages.manager.table.dirty[pages.id(cold)] = True
    pages.manager.pager.host._sink(pages.id(cold))
    pages.manager.drop(np.array([pages.id(cold)]))
    assert pages.tier(cold) == "absent"
    assert pages.manager.pager.tiers.host.used(pages.slot_class) == 0
    pages.manager.check_integrity()


@pytest.fixture
def full(tmp_path) -> Iterator[tuple[Pages, int]]:
    """A full device arena, all of it held; a free slot in host memory; and a page on disk that is asked for ahead."""
    pages = settled(Pages(tmp_path, experts=6, slots=2, host_slots=3))
    active, cold, (away,) = ([e for e in range(6) if pages.tier(e) == t] for t in ("active", "cold", "evicted"))
    pages.manager.drop(np.array([pages.id(cold[0])]))
    del pages.values[Plane.WEIGHT, cold[0]]
    with pages.manager.lease(pages.module, Plane.WEIGHT, active):
        pages.manager.pager.prefetch([pages.id(away)])
        kinds = {page: flight.kind for page, flight in pages.manager.pager.flights.items()}
        assert kinds == {pages.id(away): FlightKind.RISING}
        pages.manager.check_integrity()
        yield pages, away
    pages.manager.close()


def test_a_page_that_the_device_has_no_room_for_is_read_into_host_memory(full):
    pages, away = full
    assert pages.counts["bytes_read_ahead"] == SLOT
    settled(pages)
    assert pages.tier(away) == "cold"
    assert not pages.manager.table.dirty[pages.id(away)]
    pages.manager.check_integrity()


def test_a_page_can_be_dropped_while_it_is_read_ahead(full):
    pages, away = full
    pages.manager.drop(np.array([pages.id(away)]))
    assert pages.tier(away) == "absent"
    pages.manager.check_integrity()


def test_a_page_that_cannot_be_read_ahead_ends_the_run_and_stays_where_it_is(full, monkeypatch):
    pages, away = full
    monkeypatch.setattr(pages.manager.pager.tiers.disk, "read", broken)
    pages.jobs.complete_all()
    with pytest.raises(PageIoError, match="reading ahead"):
        pages.manager.pager.poll()
    assert pages.tier(away) == "evicted"
    pages.manager.check_integrity()


def broken(offset: int, slot: torch.Tensor, *, name: Callable[[], str]) -> None:
    raise PageIoError(f"reading ahead the {name()}: injected")


def test_a_page_that_is_wanted_while_it_is_read_ahead_comes_and_is_right(tmp_path):
    pages = settled(Pages(tmp_path, experts=6, slots=3, host_slots=3))
    active, cold, away = ([e for e in range(6) if pages.tier(e) == t] for t in ("active", "cold", "evicted"))
    assert not away
    pages.manager.pager.host._sink(pages.id(cold[0]))
    settled(pages)
    assert pages.tier(cold[0]) == "evicted"
    with pages.manager.lease(pages.module, Plane.WEIGHT, active):
        pages.manager.pager.prefetch([pages.id(cold[0])])
        assert pages.counts["pages_read_ahead"] == 1
    pages.read(cold[0])  # compares its bytes
    assert pages.tier(cold[0]) == "active"
    pages.check()


@pytest.mark.parametrize("sooner", [True, False])
def test_clean_pages_in_host_memory_give_way_to_what_is_needed_sooner(tmp_path, sooner):
    pages = settled(Pages(tmp_path, experts=6, slots=2, host_slots=2))
    active, cold, away = ([e for e in range(6) if pages.tier(e) == t] for t in ("active", "cold", "evicted"))
    pages.manager.table.dirty[[pages.id(e) for e in cold]] = False  # as if they had been written and read again
    first = pages.id(away[0])
    pages.manager.outlook.next_use = lambda ids: np.where(ids == first, 1.0 if sooner else 9.0, 5.0)  # type: ignore[method-assign, assignment]
    with pages.manager.lease(pages.module, Plane.WEIGHT, active):
        pages.manager.pager.prefetch([first])
        assert ("pages_read_ahead" in pages.counts) is sooner
    pages.manager.close()


def test_a_page_that_is_needed_later_than_all_in_host_memory_goes_on_to_disk(tmp_path):
    pages = settled(Pages(tmp_path, experts=6, slots=2, host_slots=2))
    cold = [e for e in range(6) if pages.tier(e) == "cold"]
    away = [e for e in range(6) if pages.tier(e) == "evicted"]
    active = [e for e in range(6) if pages.tier(e) == "active"]
    for expert in cold:
        pages.manager.table.dirty[pages.id(expert)] = False  # as if they had been on disk before
    late = {pages.id(expert): float(time) for time, expert in enumerate([*cold, *away, *active])}
    pages.manager.outlook.next_use = lambda ids: np.array([late[i] for i in ids.tolist()])  # type: ignore[method-assign, assignment]
    admit = pages.manager.pager.host.admit
    assert admit(pages.id(active[1])) is None
    assert [pages.tier(e) for e in cold] == ["cold", "cold"]
    late[pages.id(active[1])] = -1.0
    slot = admit(pages.id(active[1]))
    assert slot is not None
    assert [pages.tier(e) for e in cold] == ["cold", "evicted"], "the one needed last made room"
    pages.manager.pager.tiers.host.free(pages.slot_class, slot)


def test_slots_are_kept_free_by_writing_behind(tmp_path):
    pages = Pages(tmp_path, experts=14, slots=2, host_slots=8)
    pager = pages.manager.pager
    settled(pages)
    assert pages.counts["pages_sunk"] > 0
    assert pager.tiers.host.used(pages.slot_class) <= 8 - pager.pace.behind(8) < 8
    pages.check()


def test_a_failed_write_from_host_memory_names_the_page(tmp_path):
    pages = settled(Pages(tmp_path, experts=4, slots=2, host_slots=1))
    (cold,) = [e for e in range(4) if pages.tier(e) == "cold"]
    disk = pages.manager.pager.tiers.disk
    assert disk is not None

    def fails(offset: int, slot: torch.Tensor, *, name) -> None:
        raise PageIoError(f"{name()}: no space")

    disk.write = fails  # type: ignore[method-assign, assignment]
    pages.manager.table.dirty[pages.id(cold)] = True
    pages.manager.pager.host._sink(pages.id(cold))
    pages.jobs.complete_all()
    with pytest.raises(PageIoError, match=rf"weight page.*expert {cold}.*no space|expert {cold}"):
        pages.manager.pager.poll()
    assert pages.tier(cold) == "cold", "where it was"


# -- another size ------------------------------------------------------------------------------------------------------


def test_shrinking_host_memory_loses_nothing_and_gives_memory_back(tmp_path):
    layout = PageLayout(ExpertShape(hidden=256, ffn=256, gated=True, bias=False), 256)
    options = PagingOptions(
        device_budget=Budget(nbytes=0), host_budget=Budget(fraction=1.0), disk_path=tmp_path, checksum="crc32"
    )
    manager = ExpertManager(device=torch.device("cpu"), options=options)
    module = manager.add_module(path="experts", layout=layout, num_experts=96, dtypes={Plane.WEIGHT: torch.float32})
    for expert in range(96):
        manager.create(module, Plane.WEIGHT, [expert])
        with manager.lease(module, Plane.WEIGHT, [expert]) as lease:
            lease.page(expert, 0).fill_(float(expert))
            lease.mark_dirty()
    manager.pager.settle()
    budget = Budget(nbytes=8 * module.slot_class(Plane.WEIGHT).nbytes)
    host, slot_class = manager.pager.tiers.host, module.slot_class(Plane.WEIGHT)
    used = host.used(slot_class)
    assert used > 60
    process = psutil.Process()
    before = process.memory_info().rss
    manager.resize(budget, host=Budget(nbytes=used // 2 * slot_class.nbytes))
    lost = before - process.memory_info().rss
    assert host.used(slot_class) <= used // 2
    assert lost > 0.8 * (used - used // 2) * slot_class.nbytes
    manager.check_integrity()
    for expert in range(96):
        with manager.lease(module, Plane.WEIGHT, [expert]) as lease:
            assert bool((lease.page(expert, 0) == float(expert)).all())
    manager.resize(budget, host=Budget(nbytes=0))
    assert host.used(slot_class) == 0
    assert manager.options.host_budget == Budget(nbytes=0)
    manager.check_integrity()
    manager.close()


def test_a_training_has_the_same_bits_whatever_happens_to_host_memory(tmp_path):
    task = Task(steps=8, modules=2, experts=8, active=4)
    generator, found = random.Random(5), Trained()
    with batches_of(task):
        options = PagingOptions(
            device_budget=Budget(fraction=0.3), host_budget=Budget(fraction=0.3), disk_path=tmp_path
        )
        model = Model(task, options)
        for number in range(1, task.steps + 1):
            model.step(number, found)
            model.manager.check_integrity()
            host = Budget(fraction=generator.choice([0.0, 0.05, 0.2, 0.5, 1.0]))
            model.manager.resize(Budget(fraction=generator.choice([0.3, 0.5])), host=host)
            model.manager.check_integrity()
        model.export(found)
        counts = model.manager.stats()
        model.manager.close()
    assert counts["pages_sunk"] > 0
    assert not found.differs_from(train(task))

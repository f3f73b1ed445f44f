"""Copies on streams: nothing is read before it has come, nothing is overwritten that is still read, few waits."""

import itertools
import threading
from datetime import timedelta

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from megascale_omni.paging.budget import Budget
from megascale_omni.paging.copies import CopyJob, StreamCopier, coalesced
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.paging.mover import Mover
from megascale_omni.paging.planes import Plane
from megascale_omni.paging.runs import Place, runs
from megascale_omni.paging.streams import Way
from scripts.measurements.paging_model import ALL, Model, Task, Trained, batches_of, train
from tests.unit.paging.late_streams import LateStreams
from tests.unit.paging.movers import ManualMover
from tests.unit.paging.small import Pages

TASK = Task(modules=2, experts=6, active=4, steps=4, dtype=torch.bfloat16, clip=0.0)


def options(folder, *, device: float = 0.3, host: float = 0.5, prefetch: bool = True) -> PagingOptions:
    return PagingOptions(
        device_budget=Budget(fraction=device),
        host_budget=Budget(fraction=host),
        disk_path=folder,
        checksum="crc32",
        prefetch=prefetch,
    )


# -- what waits for what -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("host", [0.2, 1.0])
def test_late_copies_change_no_bit(tmp_path, seed, host):
    streams = LateStreams(seed)
    copier, mover = StreamCopier(streams), ManualMover(seed or 0)
    found = train(TASK, options(tmp_path, host=host), mover=mover, copier=copier, check=True)
    assert not found.differs_from(train(TASK))
    ways = [copied.way for copied in streams.copies]
    assert ways.count(Way.UP) > 20
    assert ways.count(Way.DOWN) > 20


def slots(count: int) -> list[torch.Tensor]:
    return list(torch.arange(16.0 * count).view(count, 16))


def test_a_copy_waits_for_the_last_lease_of_its_slot_and_for_the_copy_that_filled_it():
    streams = LateStreams()
    copier, (host, device, other) = StreamCopier(streams), slots(3)
    copier.released([device])
    copier.load([(host, device)])
    assert len(streams.copies[0].after) == 1, "the kernels of the lease"
    copier.released([device])
    copier.save([(device, other)])  # never leased since: its bytes are still coming
    assert streams.copies[1].after[1:] == [streams.copies[0].event]
    assert torch.equal(other, torch.arange(16.0))


def test_a_host_slot_is_filled_again_only_when_the_copy_out_of_it_has_ended():
    streams = LateStreams()
    copier, (host, device, other) = StreamCopier(streams), slots(3)
    copier.load([(host, device)])
    copier.save([(other, host)])
    assert streams.copies[1].after == [streams.copies[0].event]
    assert torch.equal(device, torch.arange(16.0)), "what was in the host slot before"
    assert torch.equal(host, other)


def test_compute_waits_once_for_all_pages_of_a_lease_and_not_again():
    streams = LateStreams()
    copier, all_slots = StreamCopier(streams), slots(8)
    for source, target in zip(all_slots[:4], all_slots[4:], strict=True):
        copier.load([(source, target)])
    copier.acquired(all_slots[5:7])
    assert streams.compute_waited == 1
    assert torch.equal(all_slots[6], all_slots[2])
    copier.acquired(all_slots[4:7])  # what came before is there as well
    assert streams.compute_waited == 1
    assert not torch.equal(all_slots[7], all_slots[3])
    copier.acquired(all_slots[4:])
    assert streams.compute_waited == 2
    assert torch.equal(all_slots[7], all_slots[3])


def test_a_reader_and_who_gives_memory_back_wait_for_what_is_coming():
    streams = LateStreams()
    copier, (host, device, other) = StreamCopier(streams), slots(3)
    copier.load([(host, device)])
    copier.arrived(other)
    assert streams.host_waited == 0
    copier.arrived(device)
    assert torch.equal(device, host)
    copier.load([(other, device)])
    copier.settle()
    assert torch.equal(device, other)


def test_a_new_page_gets_a_slot_that_nothing_is_coming_to(tmp_path):
    streams = LateStreams()
    pages = Pages(tmp_path, experts=4, slots=2, host_slots=4, copier=StreamCopier(streams))
    pages.jobs.complete_all()
    pages.manager.pager.poll()
    pages.send_away(*(e for e in range(4) if pages.tier(e) == "active"))
    table, host = pages.manager.table, pages.manager.pager.tiers.host
    host.tensor(pages.slot_class, int(table.slot[pages.id(0)])).fill_(7.0)
    pages.manager.pager.prefetch([pages.id(0)])
    pages.jobs.complete_all()
    pages.manager.pager.poll()
    assert pages.tier(0) == "active"
    coming = pages.manager.pager.tensor(pages.id(0)).data_ptr()
    assert not streams.copies[-1].event.done, "its bytes are still on their way"
    pages.manager.drop(np.array([pages.id(0)]))
    (new,) = pages.manager.create(pages.module, Plane.WEIGHT, [0]).tolist()
    assert pages.manager.pager.tensor(new).data_ptr() == coming
    pages.manager.page_tensor(new).zero_()
    with pages.manager.lease(pages.module, Plane.WEIGHT, [0]) as lease:
        assert not lease.page(0, 0).any()


def test_a_page_that_was_filled_and_never_leased_leaves_when_it_is_filled(tmp_path):
    """Moments are made, filled with zeros, and may leave before they are leased: the copy waits for the zeros."""
    streams = LateStreams()
    planes = (Plane.WEIGHT, Plane.MOMENT1)
    pages = Pages(tmp_path, experts=2, slots=4, host_slots=4, planes=planes, copier=StreamCopier(streams))
    (new,) = pages.manager.create(pages.module, Plane.MOMENT1, [0]).tolist()
    pages.manager.page_tensor(new).zero_()
    marked = streams.marks
    pages.manager.pager.departures.evict(new)
    pages.jobs.complete_all()
    assert max(event.number for event in streams.copies[-1].after) > marked
    pages.manager.pager.poll()
    with pages.manager.lease(pages.module, Plane.MOMENT1, [0]):
        marked = streams.marks
    pages.send_away(0, plane=Plane.MOMENT1)
    assert streams.marks == marked + 1, "the lease's own event serves from then on"


def test_a_slot_that_compaction_has_moved_a_page_out_of_is_filled_when_that_copy_is_past(tmp_path):
    """Compute makes that copy; one that brings the next page to the slot is on another stream."""
    streams = LateStreams()
    pages = Pages(tmp_path, experts=4, slots=4, host_slots=4, copier=StreamCopier(streams))
    pager, table = pages.manager.pager, pages.manager.table
    pages.send_away(0)  # host memory
    source, free = int(table.slot[pages.id(3)]), 0
    pager.relocate([(pages.id(3), free)])
    moved = streams.marks
    pager.prefetch([pages.id(0)])
    pages.jobs.complete_all()
    pager.poll()
    assert table.slot[pages.id(0)] == source, "the only free slot"
    assert max(event.number for event in streams.copies[-1].after) >= moved
    pages.check()


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_module_waits_for_one_event_and_for_none_where_all_is_there(tmp_path, prefetch):
    task = Task(modules=3, experts=6, active=6, clip=0.5, batch_bytes=1 << 20, evaluate=False, bias=False)
    with batches_of(task):  # a wave is a module's experts: slices of one width
        task = Task(**{**vars(task), "ffn": 32})
        streams = LateStreams()
        given = options(tmp_path, device=0.4, host=1.0, prefetch=prefetch)
        model = Model(task, given, ManualMover(), copier=StreamCopier(streams))
        waits: list[int] = []
        for experts in model.modules:
            forward = experts.forward

            def counted(*args, forward=forward):
                before = streams.compute_waited
                result = forward(*args)
                waits.append(streams.compute_waited - before)
                return result

            experts.forward = counted  # type: ignore[method-assign]
        found = Trained()
        for number in range(1, 4):
            model.step(number, found)
        assert set(waits) <= {0, 1}
        assert sum(waits) >= 3, "pages come"
        model.manager.resize(Budget(fraction=1.0))
        model.step(4, found)  # brings what was away
        model.step(5, found)
        del waits[:]
        waited = streams.host_waited
        model.step(6, found)
        assert set(waits) == {0}
        assert streams.host_waited == waited
        model.manager.close()


def test_where_no_page_ever_leaves_there_is_no_event_at_all():
    streams = LateStreams()
    train(TASK, ALL, copier=StreamCopier(streams))
    assert streams.compute_waited == streams.host_waited == len(streams.copies) == 0


# -- many copies at once -----------------------------------------------------------------------------------------------

PLACES = st.builds(lambda memory, slot: Place(1000 * memory, 8 * slot, 8), st.integers(1, 2), st.integers(0, 7))


@given(
    st.lists(st.tuples(PLACES, PLACES), max_size=16, unique_by=(lambda pair: pair[0], lambda pair: pair[1])),
    st.randoms(use_true_random=False),
)
def test_runs_have_every_copy_once_lie_together_and_could_not_be_longer(pairs, chance):
    found = runs(pairs)
    assert sorted(number for run in found for number in run) == list(range(len(pairs)))
    for run in found:
        for one, other in itertools.pairwise(run):
            assert pairs[one][0].is_before(pairs[other][0])
            assert pairs[one][1].is_before(pairs[other][1])
    for run in found:
        for after in found:
            source, target = pairs[run[-1]]
            assert not (source.is_before(pairs[after[0]][0]) and target.is_before(pairs[after[0]][1]))
    shuffled = list(range(len(pairs)))
    chance.shuffle(shuffled)
    again = runs([pairs[number] for number in shuffled])
    assert [[shuffled[number] for number in run] for run in again] == found


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), unique_by=(lambda p: p[0], lambda p: p[1])))
def test_coalesced_copies_move_the_same_bytes(numbers):
    host, device = torch.arange(160.0).view(10, 16), torch.zeros(10, 16)
    expected = device.clone()
    for source, target in numbers:
        expected[target] = host[source]
    copies = coalesced([(host[source], device[target]) for source, target in numbers])
    for source, target in copies:
        target.copy_(source)
    assert torch.equal(device, expected)
    assert len(copies) <= max(1, len(numbers))


def test_slots_that_lie_together_are_one_copy_and_allocations_are_never_spanned():
    host, device = torch.randn(4, 8), torch.empty(4, 8)
    assert [source.numel() for source, _ in coalesced(list(zip(host, device, strict=True)))] == [32]
    apart = [torch.empty(8) for _ in range(4)]
    assert len(coalesced(list(zip(host, apart, strict=True)))) == 4


def wait(gate: threading.Event) -> None:
    assert gate.wait(timeout=20)


def test_copies_that_wait_for_a_thread_together_are_made_together():
    streams = LateStreams()
    copier, mover = StreamCopier(streams), Mover(readers=1, writers=1, timeout=timedelta(seconds=20))
    host, device = torch.arange(48.0).view(6, 8), torch.zeros(6, 8)
    begun: list[int] = []
    gate = threading.Event()
    futures = [mover.read(lambda: wait(gate))]
    futures += [mover.read(CopyJob(copier, (host[n], device[n]), up=True)) for n in (3, 1, 2, 4)]
    futures.append(mover.read(lambda: begun.append(len(streams.copies))))
    futures.append(mover.read(CopyJob(copier, (host[0], device[0]), up=True)))
    gate.set()
    for future in futures:
        future.result(timeout=20)
    assert mover.ended == len(futures)
    assert [len(copied.pairs) for copied in streams.copies] == [1, 1], "four that lie together, then the last one"
    assert begun == [1], "in the order in which they were asked for"
    copier.settle()
    assert torch.equal(device[:5], host[:5])

    def fails(pairs):
        raise OSError("gone")

    copier.load = fails  # type: ignore[method-assign]
    gate.clear()
    futures = [
        mover.read(lambda: wait(gate)),
        *(mover.read(CopyJob(copier, (host[n], device[n]), up=True)) for n in range(3)),
    ]
    gate.set()
    futures[0].result(timeout=20)
    for future in futures[1:]:
        with pytest.raises(OSError, match="gone"):
            future.result(timeout=20)
    assert mover.close()

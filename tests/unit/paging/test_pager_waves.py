"""Pages of waves, sweeps and host memory: brought in order, made once, absent again where they are half written.

Jobs are made one by one, so that every order of events is the one that a test means.
"""

import numpy as np
import pytest
import torch

from megascale_omni.paging.planes import Plane
from megascale_omni.schedule import Phase
from tests.unit.paging.small import Pages, one_page_a_batch  # noqa: F401 - a fixture

BOTH = (Plane.WEIGHT, Plane.GRADIENT)


# -- waves and sweeps --------------------------------------------------------------------------------------------------


def test_no_tokens_are_no_waves_and_move_nothing(tmp_path):
    pages = Pages(tmp_path, planes=BOTH, slots=4)
    before = pages.counts
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert not list(pages.manager.waves(pages.module, [], planes=BOTH, phase=phase, create=Plane.GRADIENT))
    assert pages.counts == before
    assert not pages.jobs.pending


def test_gradient_pages_that_a_wave_makes_are_fresh_once(tmp_path):
    pages = Pages(tmp_path, planes=BOTH, slots=4)
    manager = pages.manager
    for number, experts in enumerate(([0, 2, 3], [2, 5])):
        for wave in manager.waves(pages.module, experts, planes=BOTH, create=Plane.GRADIENT):
            (item,) = wave.items
            assert wave.fresh == (set() if number and item[0] == 2 else {item})
            gradient = wave.leases[Plane.GRADIENT].page(*item)
            if item in wave.fresh:
                gradient.fill_(item[0])
            else:
                gradient.add_(10.0)
            wave.leases[Plane.GRADIENT].mark_dirty()
            manager.check_integrity()
    found = {
        name[0]: float(page[0])
        for name, (page,) in manager.sweep(
            pages.module, [(0, 0), (2, 0), (3, 0), (5, 0)], planes=(Plane.GRADIENT,), phase=Phase.STEP
        )
    }
    assert found == {0: 0.0, 2: 12.0, 3: 3.0, 5: 5.0}


def test_gradient_pages_of_a_wave_that_failed_are_absent_again(tmp_path):
    pages = Pages(tmp_path, planes=BOTH, slots=4)

    def work() -> None:
        for wave in pages.manager.waves(pages.module, [1, 3], planes=BOTH, create=Plane.GRADIENT):
            if wave.items[0][0] == 3:
                raise KeyError

    with pytest.raises(KeyError):
        work()
    assert pages.tier(1, Plane.GRADIENT) != "absent"
    assert pages.tier(3, Plane.GRADIENT) == "absent"
    assert not pages.manager.table.pins.any()
    pages.manager.check_integrity()


def test_a_sweep_makes_zeros_and_keeps_what_was_written_also_where_it_is_left_early(tmp_path):
    pages = Pages(tmp_path, planes=BOTH, slots=4)
    manager = pages.manager
    names = [(e, 0) for e in range(6)]
    for name, (weight, gradient) in manager.sweep(
        pages.module, names, planes=BOTH, phase=Phase.STEP, write=True, zeros=(Plane.GRADIENT,)
    ):
        assert gradient.equal(torch.zeros_like(gradient))
        gradient.fill_(50.0 + name[0])
        weight.add_(1.0)
        pages.values[Plane.WEIGHT, name[0]] += 1.0
        pages.values[Plane.GRADIENT, name[0]] = 50.0 + name[0]
        if name[0] == 4:
            break
    assert pages.tier(5, Plane.GRADIENT) == "absent"
    for _ in range(2):
        pages.check()


def test_the_group_that_is_current_is_brought_before_later_ones_and_is_not_sent_away_for_them(tmp_path):
    pages = Pages(tmp_path, experts=8, slots=5)
    names = [(e, 0) for e in range(8)]

    def sweep() -> None:
        for _ in pages.manager.sweep(pages.module, names, planes=(Plane.WEIGHT,), phase=Phase.STEP):
            pages.jobs.complete_all()

    for step in range(3):
        sweep()
        pages.manager.schedule.begin_step(step + 1)
    before = dict(pages.counts)
    sweep()
    assert pages.counts["pages_loaded"] - before["pages_loaded"] <= 8
    assert pages.counts["page_faults"] - before["page_faults"] <= 1


@pytest.mark.parametrize("at_once", [True, False], ids=["when it is let go of", "with the next page at hand"])
def test_a_used_gradient_is_written_for_nothing_unless_it_goes_before_room_is_made(tmp_path, monkeypatch, at_once):
    pages = Pages(tmp_path, experts=6, slots=4, planes=BOTH)
    names = [(expert, 0) for expert in range(6)]
    for expert in range(6):
        pages.create(expert, Plane.GRADIENT)
    manager, used, in_vain = pages.manager, list[int](), list[int]()
    start = manager.pager.departures._start

    def started(page_id: int, *, to_disk: bool = False) -> bool:
        in_vain.extend({page_id} & set(used))
        return start(page_id, to_disk=to_disk)

    monkeypatch.setattr(manager.pager.departures, "_start", started)

    def forget() -> None:
        manager.drop(np.array(used, dtype=np.int64))
        used.clear()

    released = forget if at_once else None
    for (expert, _), _ in manager.sweep(
        pages.module, names, planes=BOTH, phase=Phase.STEP, write=True, released=released
    ):
        forget()  # where it is not done yet
        used.append(pages.id(expert, Plane.GRADIENT))
    assert bool(in_vain) is not at_once
    manager.check_integrity()


def test_the_state_of_weights_that_are_behind_is_on_its_way_before_a_wave_comes_to_them(tmp_path):
    """Catching up works on moments too, which no visit of a forward tells of: they are asked for all the same."""
    planes = (Plane.WEIGHT, Plane.MOMENT1)
    pages = Pages(tmp_path, experts=4, slots=16, planes=planes)
    for expert in range(4):
        pages.create(expert, Plane.MOMENT1)
    for plane in planes:
        pages.send_away(*range(4), plane=plane)
    late, here = {1, 2}, dict[int, bool]()

    class Optimizer:
        def is_behind(self, module, page_ids):
            return np.array([pages.manager.key(i).expert in late for i in page_ids.tolist()], dtype=bool)

        def catch_up(self, module, page_ids):
            for page_id in page_ids[self.is_behind(module, page_ids)].tolist():
                expert = pages.manager.key(page_id).expert
                ids = [pages.id(expert, plane) for plane in planes]
                flights = pages.manager.pager.flights
                here[expert] = all(
                    pages.tier(expert, p) == "active" or i in flights for p, i in zip(planes, ids, strict=True)
                )
                with pages.manager.lease_ids(module, Plane.MOMENT1, np.array(ids[1:])) as lease:
                    lease.mark_dirty()

    pages.manager.set_catch_up(pages.module, Optimizer())
    for wave in pages.manager.waves(pages.module, range(4), planes=(Plane.WEIGHT,)):
        pages.jobs.complete_all()
        assert wave.items
    assert here == {1: True, 2: True}
    assert pages.tier(0, Plane.MOMENT1) == pages.tier(3, Plane.MOMENT1) == "evicted"  # nobody has asked for these
    pages.manager.check_integrity()


# -- host memory -------------------------------------------------------------------------------------------------------


def test_pages_go_to_host_memory_first_and_come_back_without_the_disk(tmp_path):
    pages = Pages(tmp_path, experts=5, slots=2, host_slots=4)  # one to spare: a page that comes back keeps its slot
    assert sorted(pages.tier(e) for e in range(5)) == ["active", "active", "cold", "cold", "cold"]
    for _ in range(3):
        pages.check()
    assert "bytes_written" not in pages.counts
    disk = pages.manager.pager.tiers.disk
    assert disk is not None
    assert (disk.bytes_read, disk.bytes_written) == (0, 0)


def test_where_host_memory_is_full_pages_go_to_disk(tmp_path):
    pages = Pages(tmp_path, experts=6, slots=2, host_slots=1)
    assert sorted(pages.tier(e) for e in range(6)).count("cold") == 1
    for _ in range(3):
        pages.check()
    host = pages.manager.pager.tiers.host
    assert host.used(pages.slot_class) <= 1


def test_a_dirty_page_that_was_in_host_memory_is_written_when_it_goes_to_disk(tmp_path):
    pages = Pages(tmp_path, experts=3, slots=2, host_slots=1)
    (cold,) = [e for e in range(3) if pages.tier(e) == "cold"]
    pages.read(cold)  # swaps with another one
    host = pages.manager.pager.tiers.host
    host.set_limit(pages.slot_class, 0)
    pages.send_away(cold)
    assert pages.tier(cold) == "evicted"
    pages.check()


def test_a_page_dropped_in_host_memory_gives_its_slot_back(tmp_path):
    pages = Pages(tmp_path, experts=3, slots=2, host_slots=1)
    (cold,) = [e for e in range(3) if pages.tier(e) == "cold"]
    pages.manager.drop(np.array([pages.id(cold)]))
    assert pages.manager.pager.tiers.host.used(pages.slot_class) == 0
    pages.manager.check_integrity()

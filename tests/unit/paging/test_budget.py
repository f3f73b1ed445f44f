"""Sharing a byte budget: floors kept, nothing given out that is not there, the smallest budget that works named."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale_omni.paging.budget import Budget, ClassNeed, parse_percent, share, smallest_budget
from megascale_omni.paging.layout import ExpertShape, PageLayout, SlotClass
from megascale_omni.paging.manager import ExpertManager, PagingOptions
from megascale_omni.paging.needs import check_budget, class_needs
from megascale_omni.paging.planes import Plane
from megascale_omni.schedule import Phase
from tests.unit.paging.movers import ManualMover
from tests.unit.paging.small import CPU, LAYOUT, SLOT

NEEDS = st.dictionaries(
    st.builds(SlotClass, st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 5000)),
    st.builds(ClassNeed, pages=st.integers(0, 300), floor=st.integers(0, 40)),
    max_size=5,
)


def total(needs: dict[SlotClass, ClassNeed]) -> int:
    return sum(need.pages * c.nbytes for c, need in needs.items())


def nbytes(slots: dict[SlotClass, int]) -> int:
    return sum(count * c.nbytes for c, count in slots.items())


@given(NEEDS, st.integers(0, 10**7))
def test_floors_are_kept_and_the_sum_is_within_the_budget_wherever_it_holds_the_floors(needs, given_bytes):
    slots = share(Budget(nbytes=given_bytes), needs)
    assert slots.keys() == needs.keys()
    for slot_class, need in needs.items():
        assert min(need.floor, need.pages) <= slots[slot_class] <= need.pages
    if given_bytes >= smallest_budget(needs):
        assert nbytes(slots) <= given_bytes
    else:
        assert nbytes(slots) == smallest_budget(needs)


@given(NEEDS, st.floats(0, 1))
def test_almost_all_of_a_budget_is_given_out(needs, fraction):
    budget = Budget(fraction=fraction)
    slots = share(budget, needs)
    left = budget.bytes_of(total(needs)) - nbytes(slots)
    assert left <= sum(c.nbytes for c in needs)  # less than a slot of each class


@given(NEEDS)
def test_everything_fits_in_all_there_is_and_in_more(needs):
    for budget in (Budget(), Budget(fraction=1.0), Budget(nbytes=total(needs)), Budget(nbytes=10 * total(needs) + 1)):
        assert share(budget, needs) == {c: need.pages for c, need in needs.items()}


@given(NEEDS)
def test_the_smallest_budget_gives_every_class_its_floor(needs):
    slots = share(Budget(nbytes=smallest_budget(needs)), needs)
    assert slots == {c: min(need.floor, need.pages) for c, need in needs.items()}


def test_without_floors_shares_are_in_proportion():
    small, large = SlotClass(torch.float32, 1024), SlotClass(torch.float32, 4096)
    needs = {small: ClassNeed(pages=100, floor=0), large: ClassNeed(pages=40, floor=0)}
    assert share(Budget(fraction=0.25), needs) == {small: 25, large: 10}


def test_what_a_floor_takes_beyond_its_share_the_others_go_without():
    small, large = SlotClass(torch.float32, 1024), SlotClass(torch.bfloat16, 2048)  # 4 KiB both
    needs = {small: ClassNeed(pages=100, floor=2), large: ClassNeed(pages=300, floor=150)}
    assert share(Budget(nbytes=160 * 4096), needs) == {small: 10, large: 150}


def test_no_classes_need_nothing():
    assert share(Budget(nbytes=5), {}) == {}
    assert smallest_budget({}) == 0


@pytest.mark.parametrize(
    ("text", "fraction"),
    [("25%", 0.25), (" 12.5 % ", 0.125), ("0%", 0.0), ("25", None), ("-5%", None), ("%", None), ("8GiB", None)],
)
def test_percentages(text, fraction):
    found = parse_percent(text)
    assert found == fraction if fraction is None else math.isclose(found or 0.0, fraction)


# -- what modules need -------------------------------------------------------------------------------------------------

FP32, BF16 = torch.float32, torch.bfloat16
TRAINED = {Plane.WEIGHT: BF16, Plane.GRADIENT: BF16, Plane.MASTER: FP32, Plane.MOMENT1: FP32, Plane.MOMENT2: FP32}


def test_a_floor_is_two_batches_of_weights_and_gradients_and_two_pages_of_all_other_planes(tmp_path, monkeypatch):
    monkeypatch.setattr("megascale_omni.paging.batches.BATCH_BYTES", 3 * SLOT)
    manager = ExpertManager(device=CPU)
    module = manager.add_module(path="a", layout=LAYOUT, num_experts=20, dtypes=TRAINED)
    assert class_needs(manager.modules) == {
        module.slot_class(Plane.WEIGHT): ClassNeed(pages=40, floor=2 * 2 * 3),
        module.slot_class(Plane.MASTER): ClassNeed(pages=60, floor=2 * 3),
    }
    # Modules add up in pages, not in floors: one is worked on at a time.
    manager.add_module(path="b", layout=LAYOUT, num_experts=1, dtypes=TRAINED)
    found = class_needs(manager.modules)
    assert found[module.slot_class(Plane.WEIGHT)] == ClassNeed(pages=42, floor=12)
    assert found[module.slot_class(Plane.MASTER)] == ClassNeed(pages=63, floor=6)


def test_a_budget_that_is_too_small_names_the_one_that_works():
    slot_class = SlotClass(FP32, 1024)
    needs = {slot_class: ClassNeed(pages=100, floor=10)}
    message = (
        r"device budget 40959 bytes is too small: .* needs 40960 bytes \(10\.0% of all pages\); "
        r"use --megascale-device-budget 40960 or more$"  # these pages are as small as pages can be
    )
    with pytest.raises(ValueError, match=message):
        check_budget(Budget(nbytes=40959), needs)
    check_budget(Budget(nbytes=40960), needs)
    check_budget(Budget(), needs)
    with pytest.raises(ValueError, match="too small"):
        check_budget(Budget(fraction=0.09), needs)
    check_budget(Budget(fraction=0.1), needs)


def test_smaller_pages_are_the_other_remedy_where_there_are_any():
    needs = {SlotClass(FP32, 1 << 20): ClassNeed(pages=100, floor=10)}
    with pytest.raises(ValueError, match=r"or more, or smaller pages \(--megascale-page-size\)$"):
        check_budget(Budget(nbytes=1), needs)


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_the_number_that_is_named_does_work(tmp_path, monkeypatch, batch):
    """Waves and steps of two modules of different sizes, with that budget and one byte less."""
    monkeypatch.setattr("megascale_omni.paging.batches.BATCH_BYTES", batch * SLOT)
    other = PageLayout(ExpertShape(hidden=24, ffn=24, gated=True, bias=True), 16)

    def start(budget: int) -> ExpertManager:
        options = PagingOptions(device_budget=Budget(nbytes=budget), disk_path=tmp_path)
        manager = ExpertManager(device=CPU, options=options, mover=ManualMover())
        for path, layout, experts in (("a", LAYOUT, 7), ("b", other, 4)):
            module = manager.add_module(path=path, layout=layout, num_experts=experts, dtypes=TRAINED)
            for plane in TRAINED:
                if plane is not Plane.GRADIENT:
                    for page_id in manager.ids(module, plane, range(experts)).reshape(-1, 1):
                        manager.create_ids(module, plane, page_id)
        return manager

    smallest = smallest_budget(class_needs(start(10**9).modules))
    assert total(class_needs(start(10**9).modules)) > smallest
    with pytest.raises(ValueError, match=f"use --megascale-device-budget {smallest} or more"):
        start(smallest - 1).check_budget()
    manager = start(smallest)
    manager.check_budget()
    both = (Plane.WEIGHT, Plane.GRADIENT)
    for _ in range(2):
        for module in manager.modules:
            experts = range(module.entry.num_experts)
            for _ in manager.waves(module, experts, planes=both, create=Plane.GRADIENT):
                manager.check_integrity()
        for module in manager.modules:
            names = [(e, s) for e in range(module.entry.num_experts) for s in range(module.entry.num_slices)]
            for _ in manager.sweep(module, names, planes=tuple(TRAINED), phase=Phase.STEP, write=True):
                pass
        assert manager.arena.bytes_used <= smallest


def test_host_memory_is_shared_without_floors(tmp_path):
    options = PagingOptions(device_budget=Budget(nbytes=0), host_budget=Budget(nbytes=2 * SLOT), disk_path=tmp_path)
    manager = ExpertManager(device=CPU, options=options)
    manager.add_module(path="a", layout=LAYOUT, num_experts=20, dtypes=TRAINED)
    host = manager.pager.tiers.host
    assert sum((host.limit(c) or 0) * c.nbytes for c in host.slot_classes()) <= 2 * SLOT
    manager.close()


def test_a_budget_of_none_for_the_host_is_no_slot_at_all(tmp_path):
    manager = ExpertManager(device=CPU, options=PagingOptions(device_budget=Budget(fraction=0.5), disk_path=tmp_path))
    manager.add_module(path="a", layout=LAYOUT, num_experts=20, dtypes=TRAINED)
    assert {manager.pager.tiers.host.limit(c) for c in manager.pager.tiers.host.slot_classes()} == {0}
    manager.close()

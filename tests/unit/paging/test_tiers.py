"""The device arena: segments that grow within a budget, slots that are taken and given back, memory never shared."""

import pytest
import torch

from megascale_omni.paging.layout import KIB, MIB, SlotClass
from megascale_omni.paging.tiers import SEGMENT_BYTES, DeviceArena

SMALL = SlotClass(torch.float32, 16 * KIB)
OTHER = SlotClass(torch.bfloat16, 16 * KIB)
LARGE = SlotClass(torch.float32, 8 * MIB)  # 32 MiB a slot: two a segment


def arena(**options) -> DeviceArena:
    return DeviceArena(device=torch.device("meta" if options.pop("meta", False) else "cpu"), **options)


def test_slots_are_numbered_from_0_in_each_class_and_the_lowest_free_one_is_taken():
    a = arena()
    assert [a.allocate(SMALL) for _ in range(4)] == [0, 1, 2, 3]
    assert a.allocate(OTHER) == 0
    a.free(SMALL, 2)
    a.free(SMALL, 1)
    assert [a.allocate(SMALL) for _ in range(3)] == [1, 2, 4]
    assert a.taken_slots(SMALL) == [0, 1, 2, 3, 4]
    assert (a.used(SMALL), a.used(OTHER)) == (5, 1)
    a.check_integrity()


def test_an_unknown_class_has_no_slots():
    a = arena()
    assert (a.used(SMALL), a.capacity(SMALL), a.taken_slots(SMALL), a.bytes_reserved) == (0, 0, [], 0)


def test_slots_do_not_share_memory():
    a = arena()
    a.reserve(SMALL, 3)
    slots = [a.allocate(SMALL) for _ in range(3)]
    a.reserve(SMALL, 2)  # a second segment
    slots += [a.allocate(SMALL) for _ in range(2)]
    for slot in slots:
        a.tensor(SMALL, slot).fill_(slot)
    for slot in slots:
        assert a.tensor(SMALL, slot).equal(torch.full((16 * KIB,), float(slot)))


def test_growing_moves_nothing():
    a = arena(meta=False)
    a.reserve(SMALL, 2)
    addresses = [a.tensor(SMALL, a.allocate(SMALL)).data_ptr() for _ in range(2)]
    a.reserve(SMALL, 100)
    assert [a.tensor(SMALL, slot).data_ptr() for slot in range(2)] == addresses


def test_a_full_class_grows_by_a_segment():
    a = arena(meta=True)
    capacities = []
    for _ in range(5):
        a.allocate(LARGE)
        capacities.append(a.capacity(LARGE))
    assert capacities == [2, 2, 4, 4, 6]
    assert a.bytes_reserved == 3 * SEGMENT_BYTES
    assert a.bytes_used == 5 * LARGE.nbytes
    a.check_integrity()


def test_a_slot_larger_than_a_segment_is_a_segment():
    huge = SlotClass(torch.float32, SEGMENT_BYTES)
    a = arena(meta=True)
    a.allocate(huge)
    assert a.capacity(huge) == 1


def test_reserving_counts_slots_that_are_free_already():
    a = arena()
    a.reserve(SMALL, 5)
    a.reserve(SMALL, 3)
    assert a.capacity(SMALL) == 5
    a.allocate(SMALL)
    a.reserve(SMALL, 5)
    assert a.capacity(SMALL) == 6
    assert a.bytes_reserved == 6 * SMALL.nbytes


def test_a_reserved_plane_lies_together():
    a = arena()
    a.reserve(SMALL, 4)
    tensors = [a.tensor(SMALL, a.allocate(SMALL)) for _ in range(4)]
    first = tensors[0].data_ptr()
    assert [t.data_ptr() - first for t in tensors] == [SMALL.nbytes * i for i in range(4)]


def test_a_budget_is_used_to_the_last_slot_and_then_named():
    a = arena(budget_bytes=3 * SMALL.nbytes + 1)
    assert [a.allocate(SMALL) for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(
            MemoryError, match=r"1 more slots of 65536 bytes exceed the budget of 196609 bytes \(196608 in use\)"
        ):
            a.allocate(SMALL)
    a.check_integrity()
    a.free(SMALL, 1)
    assert a.allocate(SMALL) == 1


def test_classes_share_one_budget():
    a = arena(budget_bytes=4 * MIB)
    a.reserve(SMALL, 60)
    with pytest.raises(MemoryError, match=r"9 more slots of 32768 bytes exceed the budget of 4194304 bytes"):
        a.reserve(OTHER, 9)
    a.reserve(OTHER, 8)
    assert a.bytes_reserved == 4 * MIB


@pytest.mark.parametrize("slot_class", [SMALL, OTHER])
def test_poison_fills_a_slot_each_time_it_is_taken(slot_class):
    a = arena(poison=True)
    slot = a.allocate(slot_class)
    assert a.tensor(slot_class, slot).isnan().all()
    a.tensor(slot_class, slot).zero_()
    a.free(slot_class, slot)
    assert a.allocate(slot_class) == slot
    assert a.tensor(slot_class, slot).isnan().all()


def test_giving_back_what_is_not_taken_is_refused():
    a = arena()
    with pytest.raises(RuntimeError, match=r"slot 0 of .* is not taken"):
        a.free(SMALL, 0)
    slot = a.allocate(SMALL)
    a.free(SMALL, slot)
    for wrong in (slot, -1, a.capacity(SMALL)):
        with pytest.raises(RuntimeError, match=rf"slot {wrong} of .* is not taken"):
            a.free(SMALL, wrong)


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda space: space.free.append(0),  # taken and free
        lambda space: space.free.append(space.free[-1]),  # free twice
        lambda space: space.free.pop(),  # neither
        lambda space: space.taken.__setitem__(3, 1),  # taken by nobody
        lambda space: space.segments.pop(),  # slots without memory
    ],
    ids=["taken-and-free", "free-twice", "lost", "taken-by-nobody", "no-memory"],
)
def test_broken_books_are_found(corrupt):
    a = arena()
    a.reserve(SMALL, 8)
    a.allocate(SMALL)
    a.check_integrity()
    corrupt(a._spaces[SMALL])
    with pytest.raises(RuntimeError, match=r"used \+ free = capacity does not hold: \d \+ \d != 8"):
        a.check_integrity()

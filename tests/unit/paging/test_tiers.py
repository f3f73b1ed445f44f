"""The arena: segments that grow and shrink, slots taken up to a limit and given back, memory never shared."""

import pytest
import torch

from megascale_omni.paging.layout import KIB, SLOT_ALIGNMENT, SlotClass
from megascale_omni.paging.tiers import SEGMENT_BYTES, Arena, ArenaFull, TierKind

MIB = 1024 * KIB
SMALL = SlotClass(torch.float32, 16 * KIB)  # 64 KiB a slot: 128 a segment
OTHER = SlotClass(torch.bfloat16, 16 * KIB)
LARGE = SlotClass(torch.float32, MIB)  # 4 MiB a slot: two a segment


def arena(**options) -> Arena:
    return Arena(device=torch.device("meta" if options.pop("meta", False) else "cpu"), **options)


def test_slots_are_numbered_from_0_in_each_class_and_the_lowest_free_one_is_taken():
    a = arena()
    assert [a.allocate(SMALL) for _ in range(4)] == [0, 1, 2, 3]
    assert a.allocate(OTHER) == 0
    a.free(SMALL, 2)
    a.free(SMALL, 1)
    assert [a.allocate(SMALL) for _ in range(3)] == [1, 2, 4]
    assert a.taken_slots(SMALL) == [0, 1, 2, 3, 4]
    assert (a.used(SMALL), a.used(OTHER)) == (5, 1)
    assert a.slot_classes() == (SMALL, OTHER)
    a.check_integrity()


def test_an_unknown_class_has_no_slots():
    a = arena()
    assert (a.used(SMALL), a.capacity(SMALL), a.taken_slots(SMALL), a.bytes_reserved) == (0, 0, [], 0)
    assert a.limit(SMALL) is None
    assert a.trim(SMALL) == 0


def test_slots_do_not_share_memory_and_begin_where_direct_io_can():
    a = arena()
    slots = [a.allocate(LARGE) for _ in range(3)]  # two segments
    slots += [a.allocate(LARGE)]
    for slot in slots:
        a.tensor(LARGE, slot).fill_(slot)
    for slot in slots:
        assert a.tensor(LARGE, slot).equal(torch.full((MIB,), float(slot)))
        assert a.tensor(LARGE, slot).data_ptr() % SLOT_ALIGNMENT == 0


def test_growing_moves_nothing():
    a = arena()
    addresses = [a.tensor(LARGE, a.allocate(LARGE)).data_ptr() for _ in range(2)]
    a.reserve(LARGE, 5)
    assert [a.tensor(LARGE, slot).data_ptr() for slot in range(2)] == addresses


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
    a = arena(meta=True)
    a.reserve(LARGE, 3)
    assert a.capacity(LARGE) == 4
    a.reserve(LARGE, 4)
    assert a.capacity(LARGE) == 4
    a.allocate(LARGE)
    a.reserve(LARGE, 4)
    assert a.capacity(LARGE) == 6
    assert a.bytes_reserved == 6 * LARGE.nbytes


def test_a_plane_lies_together():
    a = arena()
    tensors = [a.tensor(SMALL, a.allocate(SMALL)) for _ in range(4)]
    first = tensors[0].data_ptr()
    assert [t.data_ptr() - first for t in tensors] == [SMALL.nbytes * i for i in range(4)]


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_limit_is_used_to_the_last_slot_and_then_named():
    a = arena()
    a.set_limit(SMALL, 3)
    assert [a.allocate(SMALL) for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        assert not a.has_room(SMALL)
        with pytest.raises(ArenaFull, match=r"device arena: all 3 slots of .* are taken"):
            a.allocate(SMALL)
    a.check_integrity()
    a.free(SMALL, 1)
    assert a.has_room(SMALL)
    assert a.allocate(SMALL) == 1


def test_every_class_has_a_limit_of_its_own_and_an_arena_its_name():
    a = arena(meta=True, kind=TierKind.HOST)
    a.set_limit(SMALL, 0)
    with pytest.raises(ArenaFull, match="host arena: all 0 slots"):
        a.allocate(SMALL)
    assert a.allocate(OTHER) == 0
    a.set_limit(SMALL, None)
    assert a.allocate(SMALL) == 0


def test_a_limit_below_what_is_taken_takes_nothing_away():
    a = arena(meta=True)
    slots = [a.allocate(SMALL) for _ in range(5)]
    a.set_limit(SMALL, 2)
    assert a.taken_slots(SMALL) == slots
    for slot in slots[:3]:
        a.free(SMALL, slot)
        assert not a.has_room(SMALL)
    a.free(SMALL, slots[3])
    assert a.has_room(SMALL)


# -- giving memory back ------------------------------------------------------------------------------------------------


def test_trimming_returns_the_segments_that_the_limit_does_not_need():
    a = arena()
    for slot in range(8):
        a.tensor(LARGE, a.allocate(LARGE)).fill_(slot)
    for slot in (2, 3, 4, 5, 6):
        a.free(LARGE, slot)
    a.set_limit(LARGE, 3)
    assert a.trim(LARGE) == 2 * SEGMENT_BYTES  # of slots 2 to 5; 6 lies beside 7, which is taken
    assert a.bytes_reserved == 2 * SEGMENT_BYTES
    assert a.capacity(LARGE) == 4
    assert a.trim(LARGE) == 0
    a.check_integrity()
    for slot in (0, 1, 7):
        assert a.tensor(LARGE, slot).equal(torch.full((MIB,), float(slot)))


def test_free_slots_beyond_the_limit_give_their_memory_back_and_can_be_taken_again():
    a = arena()
    slots = [a.allocate(SMALL) for _ in range(6)]
    for slot in slots:
        a.tensor(SMALL, slot).fill_(1.0)
    for slot in slots[2:]:
        a.free(SMALL, slot)
    a.set_limit(SMALL, 3)
    assert a.trim(SMALL) == 0, "all lie in one segment"
    whole = [bool(a.tensor(SMALL, slot).all()) for slot in slots]
    assert whole == [True, True, True, False, False, False], "the system gave zeros where it took memory"
    assert [a.allocate(SMALL) for _ in range(1)] == [slots[2]]
    a.set_limit(SMALL, None)
    again = a.allocate(SMALL)
    a.tensor(SMALL, again).fill_(2.0)
    assert a.tensor(SMALL, again).equal(torch.full_like(a.tensor(SMALL, again), 2.0))


def test_without_a_limit_or_with_free_slots_within_it_nothing_is_trimmed():
    a = arena(meta=True)
    a.reserve(LARGE, 6)
    assert a.trim(LARGE) == 0
    a.set_limit(LARGE, 5)
    assert a.trim(LARGE) == 0
    a.set_limit(LARGE, 4)
    assert a.trim(LARGE) == SEGMENT_BYTES


def test_a_returned_segment_is_made_again_under_its_old_numbers():
    a = arena(meta=True)
    slots = [a.allocate(LARGE) for _ in range(6)]
    for slot in slots[:4]:
        a.free(LARGE, slot)
    a.set_limit(LARGE, 2)
    assert a.trim(LARGE) == 2 * SEGMENT_BYTES
    a.set_limit(LARGE, None)
    assert [a.allocate(LARGE) for _ in range(5)] == [0, 1, 2, 3, 6]
    a.check_integrity()


# -- poison, mistakes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot_class", [SMALL, OTHER])
def test_poison_fills_a_slot_each_time_it_is_taken(slot_class):
    a = arena(poison=True)
    slot = a.allocate(slot_class)
    assert a.tensor(slot_class, slot).isnan().all()
    a.tensor(slot_class, slot).zero_()
    a.free(slot_class, slot)
    assert a.allocate(slot_class) == slot
    assert a.tensor(slot_class, slot).isnan().all()


def test_memory_made_during_an_evaluation_is_ordinary_memory():
    a = arena(poison=True)
    with torch.inference_mode():
        tensor = a.tensor(SMALL, a.allocate(SMALL))
    tensor.zero_()
    x = torch.ones(3, requires_grad=True)
    (x * tensor[:3]).sum().backward()


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
        lambda space: space.taken.add(3),  # taken by nobody
        lambda space: space.segments.pop(),  # slots without memory
    ],
    ids=["taken-and-free", "free-twice", "lost", "taken-by-nobody", "no-memory"],
)
def test_broken_books_are_found(corrupt):
    a = arena()
    a.reserve(LARGE, 8)
    a.allocate(LARGE)
    a.check_integrity()
    corrupt(a._spaces[LARGE])
    with pytest.raises(RuntimeError, match=r"used \+ free = capacity does not hold: \d \+ \d != [68]"):
        a.check_integrity()

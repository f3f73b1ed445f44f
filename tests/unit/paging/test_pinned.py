"""Host memory registered segment by segment: what is registered, when it is let go, what failures say."""

import gc

import pytest
import torch

from megascale_omni.paging.layout import SlotClass
from megascale_omni.paging.pinned import PinningFailed, Registrations
from megascale_omni.paging.tiers import SEGMENT_BYTES, Arena, TierKind

CPU = torch.device("cpu")
SLOT = SlotClass(torch.float32, SEGMENT_BYTES // 4 // 4)  # four in a segment


class Code:
    """As the runtime's enumeration: not an int, but with a value."""

    def __init__(self, value: int) -> None:
        self.value = value


class FakeRuntime:
    """Keeps a list of what is registered; refuses what a real one would refuse."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.fails_at: int | None = None
        self.calls = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Code:
        self.calls += 1
        assert flags == 0
        assert address % 4096 == 0
        if self.calls == self.fails_at:
            return Code(2)
        if any(address < a + n and a < address + nbytes for a, n in self.registered.items()):
            return Code(712)
        self.registered[address] = nbytes
        return Code(0)

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else 713


def arena(runtime: FakeRuntime) -> Arena:
    return Arena(device=CPU, kind=TierKind.HOST, pin=runtime)


def test_every_segment_is_registered_whole_and_returned_when_it_is_not_needed():
    runtime = FakeRuntime()
    host = arena(runtime)
    taken = [host.allocate(SLOT) for _ in range(9)]
    assert sorted(runtime.registered.values()) == [SEGMENT_BYTES] * 3
    assert host.bytes_pinned == host.bytes_reserved == 3 * SEGMENT_BYTES
    for slot in taken:
        tensor = host.tensor(SLOT, slot)
        assert any(a <= tensor.data_ptr() < a + n for a, n in runtime.registered.items())
    for slot in taken[:8]:
        host.free(SLOT, slot)
    host.set_limit(SLOT, 1)
    assert host.trim(SLOT) == 2 * SEGMENT_BYTES
    assert len(runtime.registered) == 1
    assert next(iter(runtime.registered)) == host.tensor(SLOT, 8).data_ptr()
    host.free(SLOT, 8)
    host.set_limit(SLOT, 0)
    host.trim(SLOT)
    assert runtime.registered == {}


def test_pages_of_registered_memory_are_not_given_back_one_by_one():
    """The device would go on using the old ones: what it writes would be lost."""
    runtime = FakeRuntime()
    host = arena(runtime)
    slots = [host.allocate(SLOT) for _ in range(4)]
    for slot in slots:
        host.tensor(SLOT, slot).fill_(7.0)
    for slot in slots[1:]:
        host.free(SLOT, slot)
    host.set_limit(SLOT, 1)
    host.trim(SLOT)
    again = [host.tensor(SLOT, slots[0]), *(segment for segment in host._spaces[SLOT].segments if segment is not None)]
    assert all(bool((tensor == 7.0).all()) for tensor in again)


def test_memory_is_let_go_at_the_end_once():
    runtime = FakeRuntime()
    host = arena(runtime)
    host.allocate(SLOT)
    host.release()
    host.release()
    assert runtime.registered == {}
    other = arena(runtime)
    other.allocate(SLOT)
    assert runtime.registered
    del other
    gc.collect()
    assert runtime.registered == {}, "also where nobody says so"


def test_an_arena_that_is_not_pinned_calls_nobody():
    host = Arena(device=CPU, kind=TierKind.HOST)
    host.allocate(SLOT)
    host.release()
    assert host.bytes_pinned == 0


def test_errors_are_named_and_leave_what_there_was():
    runtime = FakeRuntime()
    host = arena(runtime)
    for _ in range(4):
        host.allocate(SLOT)
    runtime.fails_at = 2
    message = rf"cudaHostRegister of {SEGMENT_BYTES} bytes beside {SEGMENT_BYTES} .* CUDA error 2; give a smaller --meg"
    with pytest.raises(PinningFailed, match=message):
        host.allocate(SLOT)
    host.check_integrity()
    assert len(runtime.registered) == 1
    assert host.bytes_pinned == host.bytes_reserved == SEGMENT_BYTES
    host.allocate(SLOT)  # the next one goes well
    host.check_integrity()


def test_what_cannot_be_unregistered_is_an_error_and_at_the_end_a_line_in_the_log(caplog):
    runtime = FakeRuntime()
    registrations = Registrations(runtime)
    registrations.add(4096, 10)
    registrations.add(8192, 20)
    runtime.registered.pop(4096)
    with pytest.raises(PinningFailed, match=r"cudaHostUnregister of 10 bytes at 0x1000 failed with CUDA error 713"):
        registrations.remove(4096)
    registrations.add(4096 * 4, 10)
    runtime.registered.pop(8192)
    registrations.remove_all()
    assert "0x2000 failed" in caplog.text
    assert runtime.registered == {}
    assert len(registrations) == 0

"""Where bytes are: tiers of slots behind one protocol. This file has the device arena.

An arena is a list of *segments* for each slot class (see layout.SlotClass), so that it can grow and shrink without
moving what it holds. Slots are numbered densely within a slot class, over its segments.
"""

from __future__ import annotations

import enum
import heapq
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megascale_omni.paging.layout import MIB, SlotClass

SEGMENT_BYTES = 64 * MIB
"""Segments are about this large, so that a plane which stays mostly empty (gradients) takes little memory."""


class TierKind(enum.IntEnum):
    """Where a page's current bytes are; the order is from fast to slow. ``ABSENT`` pages have no bytes anywhere."""

    ABSENT = 0
    DEVICE = 1


class Tier(Protocol):
    """A place with slots. Slots are taken and given back by the manager only."""

    kind: TierKind

    def allocate(self, slot_class: SlotClass) -> int:
        """Takes a free slot; contents are undefined. Raises MemoryError when the budget is used up."""
        ...

    def free(self, slot_class: SlotClass, slot: int) -> None:
        """Gives a slot back. Raises RuntimeError when it is not taken."""
        ...

    def used(self, slot_class: SlotClass) -> int:
        """Slots taken."""
        ...

    def capacity(self, slot_class: SlotClass) -> int:
        """Slots there are, taken or free."""
        ...


@dataclass
class _SlotSpace:
    """The segments and free slots of one slot class; lowest free slot first, so that experts lie together."""

    segments: list[torch.Tensor] = field(default_factory=list)
    first_slot: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    taken: bytearray = field(default_factory=bytearray)

    @property
    def capacity(self) -> int:
        return len(self.taken)


class DeviceArena:
    """Slots in device memory (ordinary memory where there is no accelerator), under an optional byte budget.

    ``poison`` fills every slot with NaN when it is taken, so that a test sees a page that is read before it was
    written.
    """

    kind = TierKind.DEVICE

    def __init__(self, *, device: torch.device, budget_bytes: int | None = None, poison: bool = False) -> None:
        self.device = device
        self.budget_bytes = budget_bytes
        self.poison = poison
        self._spaces: dict[SlotClass, _SlotSpace] = {}
        self._bytes = 0

    @property
    def bytes_reserved(self) -> int:
        """Bytes of all segments, taken slots or not."""
        return self._bytes

    @property
    def bytes_used(self) -> int:
        """Bytes of all taken slots."""
        return sum(self.used(c) * c.nbytes for c in self._spaces)

    def reserve(self, slot_class: SlotClass, slots: int) -> None:
        """Makes sure that ``slots`` more slots can be taken, as one segment if they are not there yet.

        Raises:
            MemoryError: the segment would exceed the budget.
        """
        space = self._spaces.setdefault(slot_class, _SlotSpace())
        missing = slots - len(space.free)
        if missing <= 0:
            return
        nbytes = missing * slot_class.nbytes
        if self.budget_bytes is not None and self._bytes + nbytes > self.budget_bytes:
            raise MemoryError(
                f"device arena: {missing} more slots of {slot_class.nbytes} bytes exceed the budget of "
                f"{self.budget_bytes} bytes ({self._bytes} in use)"
            )
        first = space.capacity
        space.segments.append(torch.empty(missing, slot_class.numel, dtype=slot_class.dtype, device=self.device))
        space.first_slot.append(first)
        space.taken.extend(bytes(missing))
        space.free.extend(range(first, first + missing))  # still a heap: all new slots are larger, and ascend
        self._bytes += nbytes

    def allocate(self, slot_class: SlotClass) -> int:
        """Takes the lowest free slot; where there is none, grows by ``SEGMENT_BYTES`` or what the budget leaves."""
        space = self._spaces.setdefault(slot_class, _SlotSpace())
        if not space.free:
            room = SEGMENT_BYTES if self.budget_bytes is None else min(SEGMENT_BYTES, self.budget_bytes - self._bytes)
            self.reserve(slot_class, max(1, room // slot_class.nbytes))
        slot = heapq.heappop(space.free)
        space.taken[slot] = 1
        if self.poison:
            self.tensor(slot_class, slot).fill_(torch.nan)
        return slot

    def free(self, slot_class: SlotClass, slot: int) -> None:
        """Gives a slot back."""
        space = self._spaces.get(slot_class)
        if space is None or not 0 <= slot < space.capacity or not space.taken[slot]:
            raise RuntimeError(f"device arena: slot {slot} of {slot_class} is not taken")
        space.taken[slot] = 0
        heapq.heappush(space.free, slot)

    def tensor(self, slot_class: SlotClass, slot: int) -> torch.Tensor:
        """The slot's memory, flat, ``slot_class.numel`` elements."""
        space = self._spaces[slot_class]
        segment = 0
        while segment + 1 < len(space.first_slot) and space.first_slot[segment + 1] <= slot:
            segment += 1
        return space.segments[segment][slot - space.first_slot[segment]]

    def used(self, slot_class: SlotClass) -> int:
        """Slots taken."""
        return self.capacity(slot_class) - len(self._spaces[slot_class].free) if slot_class in self._spaces else 0

    def capacity(self, slot_class: SlotClass) -> int:
        """Slots there are."""
        return self._spaces[slot_class].capacity if slot_class in self._spaces else 0

    def slot_classes(self) -> tuple[SlotClass, ...]:
        """The slot classes that have segments."""
        return tuple(self._spaces)

    def taken_slots(self, slot_class: SlotClass) -> list[int]:
        """All taken slots of a class, ascending."""
        space = self._spaces.get(slot_class)
        return [] if space is None else [s for s, t in enumerate(space.taken) if t]

    def check_integrity(self) -> None:
        """Raises RuntimeError unless slots used + slots free = capacity, for each class, by independent counts."""
        for slot_class, space in self._spaces.items():
            used, free, capacity = sum(space.taken), len(set(space.free)), space.capacity
            in_segments = sum(s.shape[0] for s in space.segments)
            if used + free != capacity or in_segments != capacity or len(space.free) != free:
                raise RuntimeError(
                    f"device arena, {slot_class}: used + free = capacity does not hold: {used} + {free} != {capacity} "
                    f"({in_segments} slots in segments, {len(space.free)} entries in the free list)"
                )

"""Where bytes are: tiers of slots. This file has the arenas (device and host memory); ``disk.py`` has the file.

An arena is a list of *segments* for each slot class (see layout.SlotClass), so that it can grow and shrink without
moving what it holds. Slot ``s`` of a class is slot ``s % k`` of segment ``s // k``, ``k`` being the most slots that a
segment of the class can have [Note: segments]. Slots begin at multiples of the alignment that direct io needs.
"""

from __future__ import annotations

import enum
import heapq
import mmap
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch

from megascale_omni.paging.layout import MIB, SlotClass
from megascale_omni.paging.pinned import Registrations, Runtime
from megascale_omni.paging.segments import slots_to_add

SEGMENT_BYTES = 8 * MIB
"""Small segments are about this large (or one slot), so that memory follows the slots taken closely."""
LARGE_PAGE_BYTES = 2 * MIB
"""Segments of at least this size ask the system for large pages: direct io pins memory page by page, which at 4 KiB
takes more of a processor than all else about a write."""


class TierKind(enum.IntEnum):
    """Where a page's authoritative bytes are; from nowhere over fast to slow."""

    ABSENT = 0  # no bytes anywhere: a gradient page before its expert's first token
    DEVICE = 1  # device arena; can be leased
    HOST = 2  # host arena
    DISK = 3  # disk file


# Plain integers for columns of the page table: numpy looks an enum's member up at each comparison, which takes longer
# than the comparison itself, thousands of times a step.
ABSENT, DEVICE, HOST = int(TierKind.ABSENT), int(TierKind.DEVICE), int(TierKind.HOST)


class ArenaFull(MemoryError):
    """No slot of a class is free and its limit is reached: something must leave first."""


@dataclass
class _SlotSpace:
    """Segments and free slots of one slot class; lowest free slot first, so that pages lie together.

    ``slots_per_segment``: the most that one can have.
    """

    slots_per_segment: int
    segments: list[torch.Tensor | None] = field(default_factory=list)
    mappings: dict[int, mmap.mmap] = field(default_factory=dict)  # of segments in ordinary memory
    free: list[int] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)
    limit: int | None = None

    @property
    def capacity(self) -> int:
        return sum(len(segment) for segment in self.segments if segment is not None)

    def slots_of(self, index: int) -> range:
        """The slots of a segment that is there."""
        segment, first = self.segments[index], index * self.slots_per_segment
        assert segment is not None
        return range(first, first + len(segment))


class Arena:
    """Slots in device memory (ordinary memory where there is no accelerator) or in host memory.

    Args:
        kind: DEVICE or HOST. device: of the memory. pin: the CUDA runtime, for page-locked memory (host arena beside an
        accelerator). largest: bytes of the largest segment; None: all are small (see [Note: segments]). poison: fills
        every slot with NaN when it is taken, so that a test sees a page read before it was written.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        kind: TierKind = TierKind.DEVICE,
        pin: Runtime | None = None,
        largest: int | None = None,
        poison: bool = False,
    ) -> None:
        self.kind = kind
        self.largest = largest
        self.device = device
        self.poison = poison
        self._pinned = None if pin is None else Registrations(pin)
        if self._pinned is not None:  # also where nobody releases it
            weakref.finalize(self, self._pinned.remove_all)
        self._spaces: dict[SlotClass, _SlotSpace] = {}
        self._bytes = 0

    # -- size ----------------------------------------------------------------------------------------------------------

    @property
    def bytes_reserved(self) -> int:
        """Bytes of all segments, taken slots or not."""
        return self._bytes

    @property
    def bytes_used(self) -> int:
        """Bytes of all taken slots."""
        return sum(len(space.taken) * c.nbytes for c, space in self._spaces.items())

    @property
    def bytes_returnable(self) -> int:
        """Bytes of the segments that would be empty if all pages lay in as few as hold them."""
        return self._bytes - sum(len(self.slots_kept(c, ())) * c.nbytes for c in self._spaces)

    def set_limit(self, slot_class: SlotClass, slots: int | None) -> None:
        """Allows at most ``slots`` taken slots of a class (None: any number). Taken slots beyond it stay taken."""
        self._space(slot_class).limit = slots

    def limit(self, slot_class: SlotClass) -> int | None:
        """The limit of a class."""
        return self._space(slot_class).limit

    def limit_of(self, slot_class: SlotClass) -> Callable[[], int]:
        """What tells the limit of a class from now on, at little cost; 0 where there is none."""
        space = self._space(slot_class)
        return lambda: space.limit or 0

    def reserve(self, slot_class: SlotClass, slots: int) -> None:
        """Makes segments until ``slots`` more slots are free, whatever the limit."""
        space = self._space(slot_class)
        while len(space.free) < slots:
            self._grow(slot_class, space)

    def trim(self, slot_class: SlotClass, *, tight: bool = False) -> int:
        """Returns the memory of segments without a taken slot beyond what the limit needs; the bytes returned.

        ``tight``: of all segments without a taken slot.

        In ordinary memory, free slots of the segments that stay give theirs back as well where the limit does not need
        them; the system maps them again when they are written. They are not counted.
        """
        space = self._space(slot_class)
        capacity = space.capacity
        needed = 0 if tight else capacity if space.limit is None else space.limit
        busy = {slot // space.slots_per_segment for slot in space.taken}
        present = [i for i, segment in enumerate(space.segments) if segment is not None]
        freed = 0
        for index in [i for i in reversed(present) if i not in busy]:
            slots = len(space.slots_of(index))
            if capacity - slots < needed:
                continue
            self._unpin(space.segments[index])
            space.segments[index] = None
            space.mappings.pop(index, None)
            capacity -= slots
            freed += slots * slot_class.nbytes
        if freed:
            space.free = [s for s in space.free if space.segments[s // space.slots_per_segment] is not None]
            heapq.heapify(space.free)
            self._bytes -= freed
        # What is page-locked is left alone: the device would go on reading the pages that were given back.
        if space.limit is not None and slot_class.nbytes % mmap.PAGESIZE == 0 and self._pinned is None:
            needed = max(0, space.limit - len(space.taken))
            for slot in sorted(space.free)[needed:]:
                segment, place = divmod(slot, space.slots_per_segment)
                if segment in space.mappings:
                    mapping = space.mappings[segment]
                    _advise(mapping, "MADV_NOHUGEPAGE")  # or the system fills the gap again, to make a large page
                    mapping.madvise(mmap.MADV_DONTNEED, place * slot_class.nbytes, slot_class.nbytes)
        return freed

    def release(self) -> None:
        """Unlocks the memory of all segments, for good: no copy may be going on. Idempotent."""
        if self._pinned is not None:
            self._pinned.remove_all()

    @property
    def bytes_pinned(self) -> int:
        """Bytes of page-locked memory."""
        return 0 if self._pinned is None else self._pinned.nbytes

    def _unpin(self, segment: torch.Tensor | None) -> None:
        if self._pinned is not None and segment is not None:
            self._pinned.remove(segment.data_ptr())

    # -- slots ---------------------------------------------------------------------------------------------------------

    def has_room(self, slot_class: SlotClass) -> bool:
        """Whether a slot can be taken now."""
        space = self._space(slot_class)
        return space.limit is None or len(space.taken) < space.limit

    def allocate(self, slot_class: SlotClass) -> int:
        """Takes the lowest free slot; contents are undefined. Raises ArenaFull at the limit."""
        space = self._space(slot_class)
        if not self.has_room(slot_class):
            raise ArenaFull(f"{self.kind.name.lower()} arena: all {space.limit} slots of {slot_class} are taken")
        if not space.free:
            self._grow(slot_class, space)
        slot = heapq.heappop(space.free)
        space.taken.add(slot)
        if self.poison:
            self.tensor(slot_class, slot).fill_(torch.nan)
            _wait_for(self.device)  # a copy to it does not
        return slot

    def take(self, slot_class: SlotClass, slot: int) -> None:
        """Takes a certain free slot. Raises RuntimeError when it is not free."""
        space = self._space(slot_class)
        if slot not in space.free:
            raise RuntimeError(f"{self.kind.name.lower()} arena: slot {slot} of {slot_class} is not free")
        space.free.remove(slot)
        heapq.heapify(space.free)
        space.taken.add(slot)

    def slots_kept(self, slot_class: SlotClass, fixed: Collection[int]) -> list[int]:
        """Slots, ascending, of as few segments as hold all slots that are taken, those that are ``fixed`` in place."""
        space = self._space(slot_class)
        kept = self._kept(space, fixed, slots=len(space.taken))
        return [slot for index in sorted(kept) for slot in space.slots_of(index)]

    @staticmethod
    def _order(space: _SlotSpace, fixed: Collection[int]) -> list[tuple[int, bool]]:
        """Segments in the order in which they stay: those with slots that are ``fixed`` (and whether they have any),
        then those that hold most; among equals the first.
        """
        per = space.slots_per_segment
        held = {i: [0, 0] for i, segment in enumerate(space.segments) if segment is not None}
        for slot in space.taken:
            held[slot // per][0] += slot in fixed
            held[slot // per][1] += 1
        return [(i, held[i][0] > 0) for i in sorted(held, key=lambda i: (-(held[i][0] > 0), -held[i][1], i))]

    @classmethod
    def _kept(cls, space: _SlotSpace, fixed: Collection[int], *, slots: int) -> set[int]:
        """Segments that stay where ``slots`` slots are needed."""
        kept, room = set[int](), 0
        for index, stays in cls._order(space, fixed):
            if stays or room < slots:
                kept.add(index)
                room += len(space.slots_of(index))
        return kept

    def in_whole_segments(self, slot_class: SlotClass, slots: int) -> int:
        """At most ``slots``: a limit at which no more memory than that of ``slots`` stays, where segments are large."""
        if self.largest is None:
            return slots
        space, room = self._space(slot_class), 0
        for index, _ in self._order(space, ()):
            more = len(space.slots_of(index))
            if room + more > slots:
                break
            room += more
        return room

    def spare_slot(self, slot_class: SlotClass, wanted: Collection[int]) -> int:
        """A free slot that is not ``wanted``; where there is none, memory for one is made, whatever the limit."""
        space = self._space(slot_class)
        found = next((slot for slot in space.free if slot not in wanted), None)
        if found is None:
            self._grow(slot_class, space)
            found = next(slot for slot in space.free if slot not in wanted)
        return found

    def moves_to_compact(self, slot_class: SlotClass, fixed: Collection[int]) -> list[tuple[int, int]]:
        """Moves (from slot, to slot) after which :meth:`trim` can return all it may, but for slots that are ``fixed``.

        Segments that hold most stay; among equals the first.
        """
        space = self._space(slot_class)
        per = space.slots_per_segment
        allowed = len(space.taken) if space.limit is None else max(space.limit, len(space.taken))
        kept = self._kept(space, fixed, slots=allowed)
        leaving = {i for i, segment in enumerate(space.segments) if segment is not None and i not in kept}
        sources = [s for s in sorted(space.taken) if s // per in leaving and s not in fixed]
        targets = [s for s in sorted(space.free) if s // per not in leaving]
        return list(zip(sources, targets, strict=False))

    def free(self, slot_class: SlotClass, slot: int) -> None:
        """Gives a slot back. Raises RuntimeError when it is not taken."""
        space = self._spaces.get(slot_class)
        if space is None or slot not in space.taken:
            raise RuntimeError(f"{self.kind.name.lower()} arena: slot {slot} of {slot_class} is not taken")
        space.taken.remove(slot)
        heapq.heappush(space.free, slot)

    def tensor(self, slot_class: SlotClass, slot: int) -> torch.Tensor:
        """The whole slot, flat, ``slot_class.stride`` elements."""
        space = self._spaces[slot_class]
        segment = space.segments[slot // space.slots_per_segment]
        assert segment is not None
        return segment[slot % space.slots_per_segment]

    def used(self, slot_class: SlotClass) -> int:
        """Slots taken."""
        return len(self._space(slot_class).taken)

    def capacity(self, slot_class: SlotClass) -> int:
        """Slots there is memory for."""
        return self._space(slot_class).capacity

    def slot_classes(self) -> tuple[SlotClass, ...]:
        """The slot classes known."""
        return tuple(self._spaces)

    def taken_slots(self, slot_class: SlotClass) -> list[int]:
        """All taken slots of a class, ascending."""
        return sorted(self._space(slot_class).taken)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless slots used + slots free = capacity, for each class."""
        for slot_class, space in self._spaces.items():
            used, free, capacity = len(space.taken), len(set(space.free)), space.capacity
            if used + free != capacity or len(space.free) != free or space.taken & set(space.free):
                raise RuntimeError(
                    f"{self.kind.name.lower()} arena, {slot_class}: used + free = capacity does not hold: "
                    f"{used} + {free} != {capacity} ({len(space.free)} entries in the free list)"
                )

    def _space(self, slot_class: SlotClass) -> _SlotSpace:
        space = self._spaces.get(slot_class)
        if space is None:
            most = max(SEGMENT_BYTES, self.largest or 0)
            space = self._spaces[slot_class] = _SlotSpace(max(1, most // slot_class.nbytes))
        return space

    def _slots_to_add(self, slot_class: SlotClass, space: _SlotSpace) -> int:
        if self.largest is None:
            return space.slots_per_segment
        return slots_to_add(
            nbytes=slot_class.nbytes,
            capacity=space.capacity,
            limit=space.limit,
            small=SEGMENT_BYTES,
            largest=max(SEGMENT_BYTES, self.largest),
        )

    def _grow(self, slot_class: SlotClass, space: _SlotSpace) -> None:
        slots = self._slots_to_add(slot_class, space)
        shape = (slots, slot_class.stride)
        segment, mapping = _segment(shape, dtype=slot_class.dtype, device=self.device)
        if self._pinned is not None:
            self._pinned.add(segment.data_ptr(), segment.numel() * segment.element_size())
        if None in space.segments:
            index = space.segments.index(None)
            space.segments[index] = segment
        else:
            index = len(space.segments)
            space.segments.append(segment)
        if mapping is not None:
            space.mappings[index] = mapping
        space.free += space.slots_of(index)
        heapq.heapify(space.free)
        self._bytes += slots * slot_class.nbytes


def _advise(mapping: mmap.mmap, advice: str) -> None:
    """Advice about all of a mapping, where the system takes it: what it does not know changes no result."""
    try:
        mapping.madvise(getattr(mmap, advice))
    except (AttributeError, OSError):
        return


def aligned_empty(shape: tuple[int, int], *, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor that direct io can use. Its memory returns to the system when it goes."""
    return _segment(shape, dtype=dtype, device=torch.device("cpu"))[0]


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _segment(
    shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, mmap.mmap | None]:
    """An uninitialised tensor and the mapping that it lies in, where it has one of its own: a plain allocation.

    On a CPU it begins at a multiple of the slot alignment; a device aligns by itself.
    """
    numel, itemsize = shape[0] * shape[1], dtype.itemsize
    with torch.inference_mode(False):  # a segment made during an evaluation is used in training
        if device.type != "cpu":
            segment = torch.empty(shape, dtype=dtype, device=device)
            _wait_for(
                device
            )  # what was in this memory before may still be used by kernels, which copies do not wait for
            return segment, None
        # A mapping of its own: when the segment goes, its memory returns to the system, which an allocator's may
        # not. Private, so that it counts as this process's data; the system begins it at a page.
        mapped = mmap.mmap(-1, numel * itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if numel * itemsize >= LARGE_PAGE_BYTES:
            _advise(mapped, "MADV_HUGEPAGE")
        return torch.frombuffer(mapped, dtype=dtype, count=numel).view(shape), mapped

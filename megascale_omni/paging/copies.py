"""Copies of whole slots between device memory, host memory and disk, as io threads make them.

Without an accelerator a slot is read from and written to disk where it lies, and a copy is done when its call returns.
With one, copies run on streams of their own [Note: order of copies]; many that are asked for at once are few copies
where slots lie together.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from megascale_omni.bulk import TORCH, Bulk, Pair
from megascale_omni.paging.disk import DiskFile, PageIoError
from megascale_omni.paging.runs import Place, neighbours, runs
from megascale_omni.paging.streams import Event, Streams, Way

JOINED_BYTES = 64 << 20
"""What has one event at most, about: a link takes a millisecond for it."""
SMALL_BYTES = 1 << 20
"""Slots up to this size are copied by a link in less time than it takes to begin many copies of them."""
STAGED_BYTES = 8 << 20
"""Device memory, one buffer for each way, in which small slots are put together that do not lie together."""
FEWEST = 8
"""Copies that are worth it."""


class Copier:
    """Copies for a device that is ordinary memory; and what one for an accelerator does besides."""

    joins = False
    """Whether copies that wait for a thread together are better made together."""
    lands = True
    """Whether a page that was loaded is there when the call returns."""

    def load(self, pairs: Sequence[Pair]) -> None:
        """Copies host slots to device slots."""
        for source, target in pairs:
            target.copy_(source)

    def save(self, pairs: Sequence[Pair]) -> None:
        """Copies device slots to host slots. When it returns the bytes are there."""
        for source, target in pairs:
            target.copy_(source)

    def from_disk(self, disk: DiskFile, offset: int, target: torch.Tensor, *, name: Callable[[], str]) -> None:
        """Reads a device slot from disk."""
        disk.read(offset, target, name=name)

    def to_disk(self, disk: DiskFile, offset: int, source: torch.Tensor, *, name: Callable[[], str]) -> None:
        """Writes a device slot to disk."""
        disk.write(offset, source, name=name)

    def acquired(self, slots: Iterable[torch.Tensor]) -> None:
        """Compute is about to use device slots."""

    def released(self, slots: Iterable[torch.Tensor]) -> None:
        """Compute has been given all that uses them for now."""

    def created(self, slot: torch.Tensor) -> None:
        """Compute is about to fill a device slot, before anybody leases it. Who was coming there is dropped."""

    def leaves(self, slot: torch.Tensor) -> None:
        """A device slot is about to be copied, as compute has left it."""

    def arrived(self, slot: torch.Tensor) -> None:
        """Waits, on this thread, until what was loaded into a device slot is there."""

    def vacant(self, slot: torch.Tensor) -> None:
        """Waits, on this thread, until no copy reads a host slot that is to be filled."""

    def settle(self) -> None:
        """Waits until no copy is going on."""


class StreamCopier(Copier):
    """Copies between an accelerator and host memory that it can reach; see [Note: order of copies].

    [Note: small pages]
    Slots that lie together on both sides are one copy. Of small ones that lie together in host memory alone, ``bulk``
    makes one as well: it gathers them into a buffer on the device on their way down, and scatters them on their way up.

    [Note: seals]
    Where ``bulk`` has checksums, a page that goes to disk has one taken on the device before it leaves, and after it
    has come back: beside the disk's own, which begins and ends in host memory, it covers the way between.
    """

    joins = True
    lands = False

    def __init__(self, streams: Streams, bulk: Bulk = TORCH) -> None:
        self.streams = streams
        self.bulk = bulk
        self._staged: dict[Way, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._mine = threading.local()
        self._numbers = 0
        self._used: dict[int, Event] = {}  # by address of a device slot: behind the last lease
        self._arriving: dict[int, tuple[int, Event]] = {}  # copies to it that compute has not waited for, numbered
        self._leaving: dict[int, Event] = {}  # by address of a host slot: the last copy out of it
        self._new: set[int] = set()  # device slots that compute fills, and that nobody has leased yet

    # -- both ways -----------------------------------------------------------------------------------------------------

    def bring(
        self, pairs: Sequence[Pair], *, after: Sequence[Event] = (), measured: torch.Tensor | None = None
    ) -> Event:
        """Starts copies to device slots. ``measured``: where checksums of the targets go, as for :meth:`fetch`."""
        with self._lock:
            earlier = [*after, *self._known(self._used, [target for _, target in pairs])]
            event = self._start(pairs, Way.UP, after=_each_once(earlier), measured=measured)
            self._numbers += 1
            for source, target in pairs:
                self._leaving[source.data_ptr()] = event
                self._arriving[target.data_ptr()] = self._numbers, event
        return event

    def fetch(
        self, pairs: Sequence[Pair], *, after: Sequence[Event] = (), measured: torch.Tensor | None = None
    ) -> Event:
        """Starts copies from device slots; their bytes are in host memory when the event is past.

        ``measured``: int64 ``[pairs, 2]`` in host memory, where checksums of the sources go (see [Note: seals]).
        """
        with self._lock:
            sources = [source for source, _ in pairs]
            earlier = [*after, *self._known(self._used, sources)]
            earlier += [self._arriving[s.data_ptr()][1] for s in sources if s.data_ptr() in self._arriving]
            earlier += self._known(self._leaving, [target for _, target in pairs])
            return self._start(pairs, Way.DOWN, after=_each_once(earlier), measured=measured)

    def _start(
        self, pairs: Sequence[Pair], way: Way, *, after: Sequence[Event], measured: torch.Tensor | None
    ) -> Event:
        together = coalesced(pairs)
        small = all(source.numel() * source.element_size() <= SMALL_BYTES for source, _ in pairs)
        groups = _staged(together, way) if small and self.bulk.name != TORCH.name else []
        if not groups and measured is None:
            return self.streams.copy(together, way, after=after)
        alone = [pair for number, pair in enumerate(together) if not any(number in group for group in groups)]

        def work() -> None:
            self._measure(pairs, measured, way=way, before=True)
            for group in groups:
                self._through_buffer([together[number] for number in group], way)
            for source, target in alone:
                target.copy_(source, non_blocking=True)
            self._measure(pairs, measured, way=way, before=False)

        return self.streams.run(work, way, after=after)

    def _measure(self, pairs: Sequence[Pair], measured: torch.Tensor | None, *, way: Way, before: bool) -> None:
        """On the device, hence before copies that leave it and after those that come to it."""
        if measured is None or before != (way is Way.DOWN):
            return
        sums = self.bulk.checksums([pair[0] if before else pair[1] for pair in pairs])
        assert sums is not None
        measured.copy_(sums, non_blocking=True)

    def _through_buffer(self, pairs: Sequence[Pair], way: Way) -> None:
        """Pairs that lie one behind the other in host memory; on the stream of their way, whose buffer it is."""
        host = _joined([pair[1] if way is Way.DOWN else pair[0] for pair in pairs])
        slots = [pair[0] if way is Way.DOWN else pair[1] for pair in pairs]
        if way not in self._staged:
            self._staged[way] = torch.empty(STAGED_BYTES, dtype=torch.uint8, device=slots[0].device)
        buffer = self._staged[way][: host.numel() * host.element_size()].view(host.dtype)
        parts = list(buffer.split([slot.numel() for slot in slots]))
        if way is Way.DOWN:
            self.bulk.copy(list(zip(slots, parts, strict=True)))
            host.copy_(buffer, non_blocking=True)
        else:
            buffer.copy_(host, non_blocking=True)
            self.bulk.copy(list(zip(parts, slots, strict=True)))

    @staticmethod
    def _known(events: dict[int, Event], slots: Iterable[torch.Tensor]) -> list[Event]:
        return [events[slot.data_ptr()] for slot in slots if slot.data_ptr() in events]

    def load(self, pairs: Sequence[Pair]) -> None:
        """See :class:`Copier`; returns at once."""
        self.bring(pairs)

    def save(self, pairs: Sequence[Pair]) -> None:
        """See :class:`Copier`."""
        self.streams.host_waits(self.fetch(pairs))

    # -- disk ----------------------------------------------------------------------------------------------------------

    def _staging(self, slot: torch.Tensor) -> torch.Tensor:
        """A buffer of this thread, as large as the slot."""
        buffer: torch.Tensor | None = getattr(self._mine, "staging", None)
        nbytes = slot.numel() * slot.element_size()
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._mine.staging = self.streams.staging(nbytes)
        return buffer[:nbytes].view(slot.dtype)

    def _room_for_sums(self) -> torch.Tensor:
        """int64 ``[1, 2]`` in host memory, of this thread."""
        sums: torch.Tensor | None = getattr(self._mine, "sums", None)
        if sums is None:
            sums = self._mine.sums = self.streams.staging(16).view(torch.int64).view(1, 2)
        return sums

    def _seals(self, disk: DiskFile) -> bool:
        return self.bulk.name != TORCH.name and disk.checksum_name != "off"

    def from_disk(self, disk: DiskFile, offset: int, target: torch.Tensor, *, name: Callable[[], str]) -> None:
        """See :class:`Copier`; through a buffer, which is free again when it returns."""
        staging = self._staging(target)
        disk.read(offset, staging, name=name)
        seal = disk.seal(offset) if self._seals(disk) else None
        measured = None if seal is None else self._room_for_sums()
        event = self.bring([(staging, target)], measured=measured)
        self.streams.host_waits(event)
        with self._lock:  # it is there, and compute need not wait for it
            self._arriving = {slot: arrival for slot, arrival in self._arriving.items() if arrival[1] is not event}
            self._leaving.pop(staging.data_ptr(), None)
        if measured is not None and tuple(measured[0].tolist()) != seal:
            raise PageIoError(
                errno.EILSEQ,
                f"reading the {name()} failed: its checksum on the device is not the one that it left with; what was "
                "read from disk is what was written there",
            )

    def to_disk(self, disk: DiskFile, offset: int, source: torch.Tensor, *, name: Callable[[], str]) -> None:
        """See :class:`Copier`; through a buffer."""
        staging = self._staging(source)
        measured = self._room_for_sums() if self._seals(disk) else None
        self.streams.host_waits(self.fetch([(source, staging)], measured=measured))
        disk.write(
            offset, staging, name=name, seal=None if measured is None else (int(measured[0, 0]), int(measured[0, 1]))
        )

    # -- compute -------------------------------------------------------------------------------------------------------

    def acquired(self, slots: Iterable[torch.Tensor]) -> None:
        """See :class:`Copier`: one wait at most, for the last of the copies that bring them."""
        with self._lock:
            found = [self._arriving[s.data_ptr()] for s in slots if s.data_ptr() in self._arriving]
            if found:
                self._compute_waits(max(found, key=lambda arrival: arrival[0]))

    def _compute_waits(self, last: tuple[int, Event]) -> None:
        self.streams.compute_waits(last[1])
        # Whatever was started before it has been waited for as well.
        self._arriving = {slot: arrival for slot, arrival in self._arriving.items() if arrival[0] > last[0]}

    def released(self, slots: Iterable[torch.Tensor]) -> None:
        """See :class:`Copier`."""
        event = self.streams.mark()
        with self._lock:
            addresses = [slot.data_ptr() for slot in slots]
            self._used.update(dict.fromkeys(addresses, event))
            self._new.difference_update(addresses)

    def created(self, slot: torch.Tensor) -> None:
        """See :class:`Copier`."""
        self.acquired([slot])
        with self._lock:
            self._new.add(slot.data_ptr())

    def leaves(self, slot: torch.Tensor) -> None:
        """See :class:`Copier`: there is no lease's event behind what has filled it."""
        if slot.data_ptr() in self._new:
            self.released([slot])

    def arrived(self, slot: torch.Tensor) -> None:
        """See :class:`Copier`."""
        with self._lock:
            arrival = self._arriving.get(slot.data_ptr())
        if arrival is not None:
            self.streams.host_waits(arrival[1])

    def vacant(self, slot: torch.Tensor) -> None:
        """See :class:`Copier`."""
        with self._lock:
            event = self._leaving.get(slot.data_ptr())
        if event is not None:
            self.streams.host_waits(event)

    def settle(self) -> None:
        """See :class:`Copier`. Copies to the host are waited for by those who make them."""
        with self._lock:
            last = max(self._arriving.values(), key=lambda arrival: arrival[0], default=None)
            leaving, self._leaving = self._leaving, {}
        for event in _each_once([*leaving.values(), *([] if last is None else [last[1]])]):
            self.streams.host_waits(event)


def _each_once(events: Iterable[Event]) -> list[Event]:
    return list(dict.fromkeys(events))


def coalesced(pairs: Sequence[Pair]) -> list[Pair]:
    """The same bytes moved by as few copies as can be: slots that lie together on both sides go together."""
    if len(pairs) < 2:
        return list(pairs)
    places = [(_place(source), _place(target)) for source, target in pairs]
    return [(_span(pairs, run, 0), _span(pairs, run, 1)) for run in runs(places)]


def _place(slot: torch.Tensor) -> Place:
    memory = slot.untyped_storage().data_ptr()
    return Place(memory, slot.data_ptr() - memory, slot.numel() * slot.element_size())


def _span(pairs: Sequence[Pair], run: Sequence[int], side: int) -> torch.Tensor:
    return _joined([pairs[number][side] for number in run])


def _joined(slots: Sequence[torch.Tensor]) -> torch.Tensor:
    """Slots that lie one behind the other as one flat tensor."""
    if len(slots) == 1:
        return slots[0]
    return slots[0].as_strided((sum(slot.numel() for slot in slots),), (1,))


def _staged(pairs: Sequence[Pair], way: Way) -> list[list[int]]:
    """Copies, by number, that go through a buffer on the device: as many as are worth it and fit (see the Note)."""
    side = 1 if way is Way.DOWN else 0
    groups: list[list[int]] = []
    for run in neighbours([_place(pair[side]) for pair in pairs]):
        filled = STAGED_BYTES + 1
        for number in run:
            nbytes = pairs[number][side].numel() * pairs[number][side].element_size()
            if filled + nbytes > STAGED_BYTES:
                groups.append([])
                filled = 0
            groups[-1].append(number)
            filled += nbytes
    return [group for group in groups if len(group) >= FEWEST]


def portions(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Copies in their order, cut so that whoever waits for the first one does not wait for all."""
    found: list[list[Pair]] = []
    filled = JOINED_BYTES
    for pair in pairs:
        if filled >= JOINED_BYTES:
            found.append([])
            filled = 0
        found[-1].append(pair)
        filled += pair[0].numel() * pair[0].element_size()
    return found


@dataclass(frozen=True)
class CopyJob:
    """A copy for an io thread, which may be made together with others of its kind that wait at the same time."""

    copier: Copier
    pair: Pair
    up: bool

    def __call__(self) -> None:
        """Makes it alone."""
        self.together([])

    def joins(self, other: object) -> bool:
        """Whether another job that waits can be made with this one."""
        alike = isinstance(other, CopyJob) and other.up == self.up and other.copier is self.copier
        return self.copier.joins and alike

    def together(self, others: Sequence[CopyJob]) -> None:
        """Makes it, and others, at once."""
        pairs = [self.pair, *(other.pair for other in others)]
        if not self.up:
            self.copier.save(pairs)
            return
        for portion in portions(pairs):
            self.copier.load(portion)

"""Copies of whole slots between device memory, host memory and disk, as io threads make them.

Without an accelerator a slot is read from and written to disk where it lies, and a copy is done when its call returns.
With one, copies run on streams of their own [Note: order of copies]; many that are asked for at once are few copies
where slots lie together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from megascale_omni.paging.disk import DiskFile
from megascale_omni.paging.runs import Place, runs
from megascale_omni.paging.streams import Event, Streams, Way

Pair = tuple[torch.Tensor, torch.Tensor]
"""Source and target of a copy, whole slots of one class."""


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

    def arrived(self, slot: torch.Tensor) -> None:
        """Waits, on this thread, until what was loaded into a device slot is there."""

    def vacant(self, slot: torch.Tensor) -> None:
        """Waits, on this thread, until no copy reads a host slot that is to be filled."""

    def settle(self) -> None:
        """Waits until no copy is going on."""


class StreamCopier(Copier):
    """Copies between an accelerator and host memory that it can reach; see [Note: order of copies]."""

    joins = True
    lands = False

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._lock = threading.Lock()
        self._mine = threading.local()
        self._numbers = 0
        self._used: dict[int, Event] = {}  # by address of a device slot: behind the last lease
        self._arriving: dict[int, tuple[int, Event]] = {}  # copies to it that compute has not waited for, numbered
        self._leaving: dict[int, Event] = {}  # by address of a host slot: the last copy out of it

    # -- both ways -----------------------------------------------------------------------------------------------------

    def bring(self, pairs: Sequence[Pair], *, after: Sequence[Event] = ()) -> Event:
        """Starts copies to device slots."""
        with self._lock:
            earlier = [*after, *self._known(self._used, [target for _, target in pairs])]
            event = self.streams.copy(coalesced(pairs), Way.UP, after=_each_once(earlier))
            self._numbers += 1
            for source, target in pairs:
                self._leaving[source.data_ptr()] = event
                self._arriving[target.data_ptr()] = self._numbers, event
        return event

    def fetch(self, pairs: Sequence[Pair], *, after: Sequence[Event] = ()) -> Event:
        """Starts copies from device slots; their bytes are in host memory when the event is past."""
        with self._lock:
            sources = [source for source, _ in pairs]
            earlier = [*after, *self._known(self._used, sources)]
            earlier += [self._arriving[s.data_ptr()][1] for s in sources if s.data_ptr() in self._arriving]
            earlier += self._known(self._leaving, [target for _, target in pairs])
            return self.streams.copy(coalesced(pairs), Way.DOWN, after=_each_once(earlier))

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

    def from_disk(self, disk: DiskFile, offset: int, target: torch.Tensor, *, name: Callable[[], str]) -> None:
        """See :class:`Copier`; through a buffer, which is free again when it returns."""
        staging = self._staging(target)
        disk.read(offset, staging, name=name)
        event = self.bring([(staging, target)])
        self.streams.host_waits(event)
        with self._lock:  # it is there, and compute need not wait for it
            self._arriving = {slot: arrival for slot, arrival in self._arriving.items() if arrival[1] is not event}
            self._leaving.pop(staging.data_ptr(), None)

    def to_disk(self, disk: DiskFile, offset: int, source: torch.Tensor, *, name: Callable[[], str]) -> None:
        """See :class:`Copier`; through a buffer."""
        staging = self._staging(source)
        self.save([(source, staging)])
        disk.write(offset, staging, name=name)

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
            self._used.update((slot.data_ptr(), event) for slot in slots)

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
    """The slots of a run, which lie one behind the other, as one flat tensor."""
    first = pairs[run[0]][side]
    if len(run) == 1:
        return first
    numel = sum(pairs[number][side].numel() for number in run)
    return first.as_strided((numel,), (1,))


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
        if self.up:
            self.copier.load(pairs)
        else:
            self.copier.save(pairs)

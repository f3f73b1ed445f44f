"""Order between what a device computes and what is copied to it and from it: streams, events, and who waits for what.

[Note: order of copies]
Compute has a stream of its own, and so has each way of copying. Nothing waits for a stream; what must come later waits
for an event:

* a copy into or out of a slot begins after the last kernel that used the slot (an event behind each lease);
* a copy into a host slot begins after the copy out of it that may still be going on;
* compute that leases a page begins after the copy that brought it. Copies to the device end in the order in which they
  were given, so that one wait for the last of them serves all pages of a lease; where nothing comes, there is none;
* a thread waits for the copies to the host that it makes: bytes in host memory are there when the page table says so.

Everything that waits goes through :class:`Streams`, so that waits can be counted and orders tried out without a device.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch


class Way(enum.Enum):
    """Which way a copy goes; each has a stream."""

    UP = "to the device"
    DOWN = "to the host"


class Event(Protocol):
    """A place in a stream; past when everything given to the stream before it has been done."""

    def synchronize(self) -> None:
        """Waits for it, on the host."""
        ...


class Streams(Protocol):
    """See [Note: order of copies]. On any thread."""

    def mark(self) -> Event:
        """An event behind all that compute has been given."""
        ...

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], way: Way, *, after: Iterable[Event]) -> Event:
        """Copies each source to its target, in order, after the events; the event behind the last one.

        Returns at once. Of two calls for one way, the one that returned first is done first.
        """
        ...

    def run(self, work: Callable[[], None], way: Way, *, after: Iterable[Event]) -> Event:
        """The same for operations other than copies: those that ``work`` gives, on the stream of a way."""
        ...

    def compute_waits(self, event: Event) -> None:
        """What compute is given from now on begins after the event. The host goes on."""
        ...

    def host_waits(self, event: Event) -> None:
        """Waits for the event, on this thread."""
        ...

    def staging(self, nbytes: int) -> torch.Tensor:
        """A uint8 buffer of host memory that copies and direct io can use."""
        ...


class CudaStreams:
    """Streams of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {way: torch.cuda.Stream(device) for way in Way}
        self._locks = {way: threading.Lock() for way in Way}

    def mark(self) -> torch.cuda.Event:
        """See :class:`Streams`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], way: Way, *, after: Iterable[Event]
    ) -> torch.cuda.Event:
        """See :class:`Streams`."""

        def work() -> None:
            for source, target in pairs:
                target.copy_(source, non_blocking=True)

        return self.run(work, way, after=after)

    def run(self, work: Callable[[], None], way: Way, *, after: Iterable[Event]) -> torch.cuda.Event:
        """See :class:`Streams`."""
        stream = self._streams[way]
        # A thread that waits for an event sleeps: others compute.
        event = torch.cuda.Event(blocking=True)
        with self._locks[way], torch.cuda.device(self._device), torch.cuda.stream(stream):
            for earlier in after:
                assert isinstance(earlier, torch.cuda.Event)
                stream.wait_event(earlier)
            work()
            event.record(stream)
        return event

    def compute_waits(self, event: Event) -> None:
        """See :class:`Streams`."""
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(event)

    def host_waits(self, event: Event) -> None:
        """See :class:`Streams`."""
        event.synchronize()

    def staging(self, nbytes: int) -> torch.Tensor:
        """See :class:`Streams`."""
        raw = torch.empty(nbytes + _BLOCK, dtype=torch.uint8, pin_memory=True)
        start = -raw.data_ptr() % _BLOCK
        return raw[start : start + nbytes]


_BLOCK = 4096
"""Direct io reads and writes whole blocks."""

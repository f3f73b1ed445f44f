"""Streams without a device: copies are made as late as events allow, or at random moments before, and waits counted.

Whoever uses what a copy brings without waiting for it finds the bytes of before. Compute has none of its own: what a
test computes is done at once, so that its marks are past when they are made; what a copy waits for is recorded.
"""

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from megascale_omni.paging.streams import Event, Way
from megascale_omni.paging.tiers import aligned_empty


class LateEvent:
    """Past when it is done; a compute mark always is."""

    def __init__(self, streams: "LateStreams", way: Way | None = None) -> None:
        self.streams, self.way = streams, way
        self.done = way is None
        self.number = streams.marks

    def synchronize(self) -> None:
        self.streams.host_waits(self)


@dataclass
class Copied:
    """A call of ``copy``: what was to be copied, and what it waits for."""

    pairs: list[tuple[torch.Tensor, torch.Tensor]]
    way: Way
    after: list[LateEvent]
    event: LateEvent
    work: Callable[[], None] = lambda: None


@dataclass
class LateStreams:
    """See :class:`megascale_omni.paging.streams.Streams`; ``seed`` None: as late as can be."""

    seed: int | None = None
    compute_waited: int = 0
    host_waited: int = 0
    marks: int = 0
    copies: list[Copied] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._queues: dict[Way, list[Copied]] = {way: [] for way in Way}
        self._random = None if self.seed is None else random.Random(self.seed)
        self._lock = threading.RLock()

    def mark(self) -> LateEvent:
        self.marks += 1
        return LateEvent(self)

    def copy(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], way: Way, *, after: Iterable[Event]
    ) -> LateEvent:
        with self._lock:
            return self._later(list(pairs), lambda: None, way, after)

    def run(self, work: Callable[[], None], way: Way, *, after: Iterable[Event]) -> LateEvent:
        with self._lock:
            return self._later([], work, way, after)

    def _later(
        self,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        work: Callable[[], None],
        way: Way,
        after: Iterable[Event],
    ) -> LateEvent:
        event = LateEvent(self, way)
        earlier = [each for each in after if isinstance(each, LateEvent)]
        copied = Copied(pairs, way, earlier, event, work)
        self.copies.append(copied)
        self._queues[way].append(copied)
        self._some()
        return event

    def _some(self) -> None:
        while self._random is not None and self._random.random() < 0.4:
            way = self._random.choice(list(Way))
            if self._queues[way]:
                self._next(way)

    def _next(self, way: Way) -> None:
        copied = self._queues[way].pop(0)
        for event in copied.after:
            self._until(event)
        for source, target in copied.pairs:
            target.copy_(source)
        copied.work()
        copied.event.done = True

    def _until(self, event: LateEvent) -> None:
        while not event.done:
            assert event.way is not None
            self._next(event.way)

    def compute_waits(self, event: Event) -> None:
        with self._lock:
            assert isinstance(event, LateEvent)
            self.compute_waited += 1
            self._until(event)

    def host_waits(self, event: Event) -> None:
        with self._lock:
            assert isinstance(event, LateEvent)
            self.host_waited += 1
            self._until(event)

    def staging(self, nbytes: int) -> torch.Tensor:
        return aligned_empty((1, nbytes), dtype=torch.uint8)[0]

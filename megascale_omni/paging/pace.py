"""How fast pages are read, written and used, as measured; and how far ahead of its use a page is therefore asked for.

[Note: pace]
A page must be asked for as many pages ahead as are used while it is read: ``seconds of a read / seconds between uses``.
Fewer, and work waits although the disk is idle; more, and pages take room before their time. The same holds for
writing: as many slots of the host arena are kept free as pages leave the device while one is written. Times are fading
averages of what jobs took on their threads, so that they follow the disk as it is shared and the model as it is
computed. They decide when something is moved, never what is computed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

FADING = 0.9
"""What an average keeps of itself at each new measurement."""

LEAST_AHEAD, MOST_AHEAD = 4, 16
"""Pages that are always fetched ahead: as many as there are readers, and so many that more of them would only wait."""

UNMEASURED_AHEAD = 8


class Pace:
    """Fading averages, in seconds a page; None until something was measured."""

    def __init__(self) -> None:
        self.read_seconds: float | None = None
        self.write_seconds: float | None = None
        self.use_seconds: float | None = None
        self.leave_seconds: float | None = None
        self._used_until: float | None = None
        self._left_at: float | None = None

    def reading(self, job: Callable[[], None]) -> Callable[[], None]:
        """The job, timed as a page's read."""

        def timed() -> None:
            start = time.perf_counter()
            job()
            self.read_seconds = _faded(self.read_seconds, time.perf_counter() - start)

        return timed

    def writing(self, job: Callable[[], None]) -> Callable[[], None]:
        """The job, timed as a page's write."""

        def timed() -> None:
            start = time.perf_counter()
            job()
            self.write_seconds = _faded(self.write_seconds, time.perf_counter() - start)

        return timed

    def wanted(self, pages: int) -> None:
        """Work has come to ``pages`` pages more."""
        if self._used_until is not None and pages:
            self.use_seconds = _faded(self.use_seconds, (time.perf_counter() - self._used_until) / pages)

    def served(self) -> None:
        """They are there: what follows is work, no waiting."""
        self._used_until = time.perf_counter()

    def left(self) -> None:
        """A page leaves the device."""
        now = time.perf_counter()
        if self._left_at is not None:
            self.leave_seconds = _faded(self.leave_seconds, now - self._left_at)
        self._left_at = now

    def ahead(self) -> int:
        """Pages that are fetched ahead whatever they displace."""
        if self.read_seconds is None or self.use_seconds is None:
            return UNMEASURED_AHEAD
        return min(MOST_AHEAD, max(LEAST_AHEAD, 1 + _ratio(self.read_seconds, self.use_seconds)))

    def behind(self, slots: int) -> int:
        """Of a host arena of ``slots`` slots, those that are kept free by writing ahead of need."""
        if self.write_seconds is None or self.leave_seconds is None:
            return min(1, slots // 4)
        return min(slots // 4, 1 + _ratio(self.write_seconds, self.leave_seconds))


def _faded(before: float | None, new: float) -> float:
    return new if before is None else FADING * before + (1.0 - FADING) * new


def _ratio(one: float, other: float) -> int:
    return MOST_AHEAD if other <= 0.0 else math.ceil(min(one / other, MOST_AHEAD))

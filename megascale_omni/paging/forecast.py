"""When a page will be used next, as far as the announced schedule tells.

[Note: next use]
A training step visits modules in an order that the next step repeats: forward through the layers for each micro-batch,
backward, optimizer. The forecast keeps the sequence of visits (module, planes) of the last whole step. Time is the
position in that sequence, counted on over steps; within a visit pages are used in ascending order, so that page ``i``
of ``n`` is used at ``position + i / n``. Whoever evicts the page whose next use is farthest away does what Belady's MIN
does, up to pages of experts that get no tokens.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from megascale_omni.paging.planes import Plane
from megascale_omni.schedule import Phase

FAR = float(1 << 40)
"""Later than any use that is known."""

LONGEST_STEP = 1 << 16
"""Visits after which a step is taken to be over where nobody says so, lest the record grows for ever."""


@dataclass(frozen=True)
class Visit:
    """A phase's pass over one module's pages, and the planes it uses."""

    phase: Phase
    module: int
    planes: tuple[Plane, ...]


class Forecast:
    """The visits of this step so far, and those of the last whole step as what comes."""

    def __init__(self) -> None:
        self._last: list[Visit] = []
        self._now: list[Visit] = []
        self._current: Visit | None = None
        self._positions: dict[tuple[Plane, int], list[int]] = {}

    def visit(self, visit: Visit) -> None:
        """A visit begins. Evaluation and exports are not what the next training step repeats, and are not kept."""
        self._current = visit
        if visit.phase not in (Phase.EVAL, Phase.IDLE):
            if len(self._now) >= LONGEST_STEP:
                self.end_step()
            self._now.append(visit)

    def end_step(self) -> None:
        """The step is over: its visits are what the next one will do."""
        self._last, self._now = self._now, []
        self._positions = {}
        for position, visit in enumerate(self._last):
            for plane in visit.planes:
                self._positions.setdefault((plane, visit.module), []).append(position)

    @property
    def position(self) -> int:
        """Position of the current visit (-1 before the first)."""
        return len(self._now) - 1

    @property
    def length(self) -> int:
        """Visits of a whole step."""
        return len(self._last)

    def uses_now(self, plane: Plane) -> bool:
        """Whether the current visit uses ``plane``."""
        return self._current is not None and plane in self._current.planes

    def next_visit(self, plane: Plane, module: int, *, after: int) -> float:
        """Position of the first visit after ``after`` that uses ``plane`` of ``module``; FAR where none is known."""
        positions = self._positions.get((plane, module))
        if not positions:
            return FAR
        # A step may turn out longer than the last one; what comes then is taken to be another round of it.
        rounds, place = divmod(after, len(self._last))
        index = bisect.bisect_right(positions, place)
        found = positions[index] if index < len(positions) else positions[0] + len(self._last)
        return found + rounds * len(self._last)

    def following(self, count: int) -> list[Visit]:
        """The next ``count`` visits after the current one, as the last step had them."""
        start = self.position + 1
        return [self._last[(start + i) % len(self._last)] for i in range(count)] if self._last else []

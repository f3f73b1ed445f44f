"""Which visits come next, as far as the announced schedule tells.

[Note: next use]
A training step visits modules in an order that the next step repeats: forward through the layers for each micro-batch,
backward, optimizer. The forecast keeps the visits of the last whole step; what comes is the rest of it, and then all of
it again. An evaluation is a few passes of forward visits in between: its passes repeat each other, and the next
evaluation has as many of them as the last one. Time counts visits since the start and never goes back; within a visit
pages are used in ascending order, so that page ``i`` of ``n`` is used at ``time + i / n``. Whoever evicts the page
whose next use is farthest away does what Belady's MIN does, up to experts whose tokens nobody can foresee
(``outlook.py``).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megascale_omni.paging.planes import Plane
from megascale_omni.schedule import Phase

FAR = float(1 << 40)
"""Later than any use that is known."""

LONGEST_STEP = 1 << 16
"""Visits after which a step is taken to be over where nobody says so, lest the record grows for ever."""

LONGEST_DEVIATION = 512
"""Visits that a step may leave out and still be recognised as what was foretold."""


@dataclass(frozen=True)
class Visit:
    """A phase's pass over one module's pages, and the planes it uses."""

    phase: Phase
    module: int
    planes: tuple[Plane, ...]

    @property
    def kind(self) -> tuple[Phase, int, bool]:
        """What makes two visits the same for the forecast: phase, module, and whether gradients alone are looked at.

        Otherwise planes do not matter: an empty module may be visited without its gradients.
        """
        return self.phase, self.module, self.planes == (Plane.GRADIENT,)

    @cached_property
    def mask(self) -> np.ndarray:
        """The same as :meth:`uses`, for every plane by its number."""
        return np.asarray([plane in self.planes for plane in Plane])

    def uses(self, plane: Plane) -> bool:
        """Whether the visit uses ``plane``."""
        return plane in self.planes


class Forecast:
    """The visits of this step so far, and those of the last whole step as what comes."""

    def __init__(self) -> None:
        self.time = -1
        self.generation = 0
        self.current: Visit | None = None
        self._last: list[Visit] = []
        self._now: list[Visit] = []
        self._coming: list[Visit] = []
        self._origin = 0  # time of the first visit of _coming
        self._step_ends = 0  # place in _coming where what is foretold of the step at hand ends
        self._places: dict[int, list[int]] = {}  # of each module in _coming
        self._pass: list[Visit] = []  # evaluation: one pass
        self._passes = 2  # of the last evaluation
        self._evaluated: list[Visit] | None = None  # visits of the evaluation at hand

    # -- what happens --------------------------------------------------------------------------------------------------

    def visit(self, visit: Visit) -> None:
        """A visit begins. Exports and the like (IDLE) are not foretold and foretell nothing."""
        self.current = visit
        if visit.phase is Phase.IDLE:
            return
        self.time += 1
        if visit.phase is Phase.EVAL:
            self._evaluate(visit)
        else:
            if self._evaluated is not None:
                self._end_evaluation()
            if len(self._now) >= LONGEST_STEP:
                self.end_step()
            self._now.append(visit)
        self._follow(visit)

    def end_step(self) -> None:
        """The step is over: its visits are what the next one will do."""
        if not self._now:
            return
        same = [v.kind for v in self._now] == [v.kind for v in self._last]
        as_foretold = same and self._origin + len(self._now) == self.time + 1
        self._last, self._now = self._now, []
        if self._evaluated is None:
            self._foretell(self._last * 2, keeps=as_foretold)
            self._step_ends = len(self._last)

    def _evaluate(self, visit: Visit) -> None:
        if self._evaluated is None:
            self._evaluated = []
            if not self._pass:
                seen = dict.fromkeys(v.module for v in self._last if v.phase is Phase.FORWARD)
                self._pass = [Visit(Phase.EVAL, module, visit.planes) for module in seen]
            self._foretell(self._pass * self._passes + self._remaining(), shift=0)
        elif self._evaluated and visit.kind == self._evaluated[0].kind:  # another pass begins
            passes = sum(v.kind == visit.kind for v in self._evaluated)
            if passes == 1:
                self._pass = list(self._evaluated)
            if passes >= self._passes:  # more than the last evaluation had: take it that there is one more, always
                self._passes = passes + 2
                self._foretell(self._pass * 2 + self._remaining(), shift=0)
        self._evaluated.append(visit)

    def _end_evaluation(self) -> None:
        assert self._evaluated is not None
        first = self._evaluated[0]
        self._passes = sum(v.kind == first.kind for v in self._evaluated)
        self._pass = self._evaluated[: len(self._evaluated) // self._passes]
        self._evaluated = None
        self._foretell(self._remaining(), shift=0)

    def _remaining(self) -> list[Visit]:
        """What training does next."""
        return self._last[len(self._now) :] + self._last

    # -- what comes ----------------------------------------------------------------------------------------------------

    def _foretell(self, visits: list[Visit], *, shift: int = 1, keeps: bool = False) -> None:
        """``visits`` are what comes, from now on (``shift`` 0: the first is the one that is beginning)."""
        self._coming, self._origin, self._step_ends = visits, self.time + shift, len(visits)
        self._index()
        if not keeps:
            self.generation += 1

    def _index(self) -> None:
        self._places = {}
        for place, visit in enumerate(self._coming):
            self._places.setdefault(visit.module, []).append(place)

    def _follow(self, visit: Visit) -> None:
        """Keeps what was foretold in step with what happens.

        A visit that is foretold a little later has come early; one that is not foretold for this step is one more.
        """
        place = self.time - self._origin
        if 0 <= place < len(self._coming) and self._coming[place].kind == visit.kind:
            return
        self.generation += 1
        until = min(place + LONGEST_DEVIATION, self._step_ends)
        ahead = [v.kind for v in self._coming[place:until]] if place >= 0 else []
        if visit.kind in ahead:
            self._origin -= ahead.index(visit.kind)
        else:
            self._origin += 1

    @property
    def length(self) -> int:
        """Visits of a whole step; 0 before the first has ended."""
        return len(self._last)

    def uses_now(self, plane: Plane) -> bool:
        """Whether the current visit uses ``plane``."""
        return self.current is not None and self.current.uses(plane)

    def coming_to(self, module: int) -> Iterator[tuple[int, Visit]]:
        """Visits of ``module`` after the current one, as (time, visit), the next one first."""
        places = self._places.get(module, [])
        for place in places[bisect.bisect_right(places, self.time - self._origin) :]:
            yield self._origin + place, self._coming[place]

    @property
    def next_visit(self) -> Visit | None:
        """The visit after the current one, where it is known."""
        place = max(0, self.time + 1 - self._origin)
        return self._coming[place] if place < len(self._coming) else None

    def following(self, count: int) -> Sequence[Visit]:
        """The next ``count`` visits after the current one, as far as they are known."""
        start = max(0, self.time + 1 - self._origin)
        return self._coming[start : start + count]

"""When a page will be used next: the coming visits, and which experts they need.

[Note: what is known of experts]
A backward needs the experts of its forward, and backwards come in the order of their forwards; the optimizer needs the
experts that got tokens since the last step. So much is certain. Which experts a forward that has not begun will need is
not known before its router has spoken: each is taken to be needed with the frequency of its recent past. Of a page
whose next use is uncertain the early uses count most, since a page that leaves is missed there: a use ``t`` visits away
weighs ``exp(-t / horizon)``, the weights are averaged by probability, and the average is taken back to a time. For a
certain use that is the time itself.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megascale_omni.paging.forecast import FAR, Forecast, Visit
from megascale_omni.paging.planes import NUM_PLANES, ModuleEntry, PageNumbering, Plane
from megascale_omni.schedule import Phase

MEMORY = 0.08
"""Weight of the newest forward in an expert's frequency."""

LEAST_FREQUENCY = 1e-3
"""An expert is never taken to be gone for ever."""

HORIZON_VISITS = 4
"""Horizon of uncertain uses in visits for each module: two micro-batches there and back."""

LEAST_WEIGHT = 1e-300
NEGLIGIBLE = 0.02
"""Probability of not having been used yet below which later visits do not matter."""


_NOTHING, _ONE = np.zeros(1), np.ones(1)


@dataclass
class Experts:
    """What is known of a module's experts. ``frequency`` of tokens in a forward, ``pending`` backwards, ``stepped``:
    those with a gradient in this step, ``foreseen``: those that the next forward will need, where something tells.
    """

    frequency: np.ndarray
    pending: deque[np.ndarray] = field(default_factory=deque)
    stepped: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    foreseen: np.ndarray | None = None
    forwards: int = 0
    stepping: bool = False

    @classmethod
    def of(cls, num_experts: int) -> Experts:
        """Nothing is known yet: every expert is taken to be needed."""
        return cls(np.ones(num_experts), stepped=np.zeros(num_experts, dtype=bool))

    def see(self, phase: Phase, active: np.ndarray) -> None:
        """A visit needs the experts ``active`` (a mask)."""
        self.stepping = phase is Phase.STEP
        if phase in (Phase.FORWARD, Phase.EVAL):
            self.forwards += 1
            weight = max(MEMORY, 1.0 / self.forwards)
            self.frequency += weight * (active - self.frequency)
            np.maximum(self.frequency, LEAST_FREQUENCY, out=self.frequency)
            self.foreseen = None
        if phase is Phase.FORWARD:
            self.pending.append(active)
            self.stepped = self.stepped | active
        if phase is Phase.BACKWARD and self.pending:
            self.pending.popleft()

    def end_step(self) -> None:
        """Gradients are gone."""
        self.pending.clear()
        self.stepping = False
        self.stepped = np.zeros_like(self.stepped)


def expected_use(
    experts: Experts, plane: Plane, coming: Iterable[tuple[int, Visit]], *, length: int, now: int, horizon: float
) -> np.ndarray:
    """Time of the next use of ``plane`` of each expert, ``[num_experts]``, by the visits to come after time ``now``.

    ``length`` is a step's number of visits: how far away it is at least when the visits end without a use. ``horizon``
    is how many visits ahead an uncertain use still weighs much, see [Note: what is known of experts].
    """
    p = experts.frequency
    weight, unused = _NOTHING, _ONE
    stepped: np.ndarray = experts.stepped
    backwards, unknown, stepping, time = 0, 0, experts.stepping, 0
    read_forward = False
    for time, visit in coming:
        if visit.phase in (Phase.FORWARD, Phase.EVAL):
            if stepping:  # another step begins, of which nothing is known yet
                stepped, unknown, stepping = np.zeros_like(stepped), 0, False
                if plane is Plane.GRADIENT:
                    break
            unknown += visit.phase is Phase.FORWARD
            if not visit.uses(plane):
                continue
            read_forward = True
            chance = p
            if experts.foreseen is not None and unknown <= 1:
                chance = np.clip(experts.foreseen, LEAST_FREQUENCY, 1.0 - LEAST_FREQUENCY)
        elif visit.phase in (Phase.BACKWARD, Phase.RECOMPUTE):
            number = backwards
            backwards += visit.phase is Phase.BACKWARD
            if not visit.uses(plane):
                continue
            if number < len(experts.pending):
                chance = experts.pending[number]
            elif read_forward:
                continue  # what the forward did not use, the backward does not either
            else:
                chance = p
        else:
            stepping = True
            if not visit.uses(plane):
                continue
            chance = stepped
            if not read_forward and plane is not Plane.GRADIENT and unknown:
                chance = np.maximum(chance, 1.0 - (1.0 - p) ** unknown)
        if not weight.any() and chance.min(initial=True) >= 1.0:
            return np.full_like(p, float(time))  # certain, and the first: what follows would come to the same
        weight = weight + unused * chance * math.exp((now - time) / horizon)
        unused = unused * (1.0 - chance)
        unused = np.where(unused < NEGLIGIBLE, 0.0, unused)
        if not unused.any():
            break
    if plane is not Plane.GRADIENT:  # of these, what has no use in this step is dropped with it
        if time == 0:
            return np.full_like(p, FAR)
        weight = weight + unused * np.exp((now - time - length / p) / horizon)
    weight = np.broadcast_to(weight, p.shape)
    use = now - horizon * np.log(np.maximum(weight, LEAST_WEIGHT))
    return np.where(weight > LEAST_WEIGHT, use.round(6), FAR)  # equal times stay equal


def alike(planes: Iterable[Plane], used_together: Sequence[tuple[Plane, ...]]) -> tuple[tuple[Plane, ...], ...]:
    """Planes that every visit uses both or neither, and whose next uses are therefore the same."""
    groups: dict[tuple[bool, ...], list[Plane]] = {}
    for plane in sorted(planes):
        # Gradients go with a step's end, which no visit tells.
        signature = (plane is Plane.GRADIENT, *(plane in visit for visit in used_together))
        groups.setdefault(signature, []).append(plane)
    return tuple(tuple(group) for group in groups.values())


class Outlook:
    """Next uses of pages. Fed with visits; ``cursor`` is how far the current visit has come (fraction of a module)."""

    def __init__(self, numbering: PageNumbering) -> None:
        self.forecast = Forecast()
        self.cursor = -1.0
        self._numbering = numbering
        self._experts: dict[int, Experts] = {}
        self._here = np.zeros(0, dtype=bool)  # page indices of the module that the current visit needs
        self._values = np.zeros(0)
        self._now = np.zeros(0)  # the same, but for pages that the current visit has still to use
        self.use_at = self._now.data
        """When a page is used next, as of the last :meth:`update`: by page id, as plain numbers."""
        self._places: list[int] = []  # of these (numbers in the module), and their ids [pages, planes]
        self._place_ids = np.zeros((0, 0), dtype=np.int64)
        self._passed = 0  # how many of these places the visit has passed since
        self.stamp = 0  # another one whenever something was learnt about experts
        self.epoch = 0  # another one whenever next uses were computed anew, and not only for pages that were passed
        self._current = False  # whether _now is up to date
        self._stale: set[int] = set()  # modules whose _values are not up to date
        self._fractions: dict[int, np.ndarray] = {}  # of a visit that has passed when it comes to each page of a module
        self._generation = -1
        self._planes: set[Plane] = set()  # that some visit has used
        self._used_together: list[tuple[Plane, ...]] = []
        self._alike: tuple[tuple[Plane, ...], ...] = ()

    def experts(self, module: int) -> Experts:
        """What is known of a module's experts."""
        if module not in self._experts:
            self._experts[module] = Experts.of(self._numbering.entries[module].num_experts)
        return self._experts[module]

    def begin(self, visit: Visit, indices: np.ndarray) -> None:
        """A visit begins that needs the page indices ``indices`` of its module (from 0 in the module)."""
        self.forecast.visit(visit)
        entry = self._numbering.entries[visit.module]
        self.cursor = -1.0
        self._current = False
        self._here = np.zeros(entry.num_pages, dtype=bool)
        self._here[indices] = True
        if visit.planes not in self._used_together:
            self._used_together.append(visit.planes)
            self._planes.update(visit.planes)
            self._alike = alike(self._planes, self._used_together)
            self._stale.update(range(len(self._numbering.entries)))
        if visit.phase is not Phase.IDLE:
            active = np.asarray(self._here.reshape(entry.num_experts, entry.num_slices).any(axis=1))
            self.experts(visit.module).see(visit.phase, active)
            self._forget(visit.module)

    def reached(self, index: int) -> None:
        """The current visit works on page ``index`` of its module."""
        if index < self.cursor:
            self._current = False
        self.cursor = float(index)

    def end_step(self) -> None:
        """A training step is over."""
        self.forecast.end_step()
        for module, experts in self._experts.items():
            experts.end_step()
            self._forget(module)

    def foresee(self, module: int, active: np.ndarray) -> None:
        """The next forward of ``module`` will probably need the experts ``active`` (a mask, or probabilities)."""
        self.experts(module).foreseen = active.astype(float)
        self._forget(module)

    def _forget(self, module: int) -> None:
        self.stamp += 1
        self._stale.add(module)
        self._current = False

    def probable(self, module: int) -> np.ndarray:
        """How probable it is that a module's next visit needs each expert, ``[num_experts]``."""
        experts = self.experts(module)
        for _, visit in self.forecast.coming_to(module):
            if visit.phase in (Phase.BACKWARD, Phase.RECOMPUTE) and experts.pending:
                return experts.pending[0].astype(float)
            if visit.phase is Phase.STEP:
                return experts.stepped.astype(float)
            break
        return experts.frequency if experts.foreseen is None else experts.foreseen

    def next_use(self, page_ids: np.ndarray) -> np.ndarray:
        """When each page is used next, see [Note: next use] and [Note: what is known of experts]."""
        self.update()
        result: np.ndarray = self._now[page_ids]
        return result

    @property
    def num_passed(self) -> int:
        """How many of its pages the current visit has passed since the epoch began, as of the last :meth:`update`."""
        return self._passed

    def passed_since(self, number: int) -> list[int]:
        """Ids of those that it passed after the first ``number`` of them: their next uses are others now."""
        passed: list[int] = self._place_ids[number : self._passed].reshape(-1).tolist()
        return passed

    def update(self) -> None:
        """Brings ``_values`` (by the visits to come) and ``_now`` (and by the rest of the current one) up to date."""
        generation, num_pages = self.forecast.generation, self._numbering.num_pages
        if self._current and self._generation == generation and len(self._values) >= num_pages:
            self._pass()
            return
        if self._generation != generation:
            self._stale.update(range(len(self._numbering.entries)))
            self._generation = generation
        if len(self._values) < num_pages:
            self._values, self._now = np.full(num_pages, FAR), np.full(num_pages, FAR)
            self.use_at = self._now.data
            self._stale.update(range(len(self._numbering.entries)))
        for module in self._stale:
            for planes in self._alike:  # pages of others have no use that is known
                self._refresh(self._numbering.entries[module], planes)
        self._stale.clear()
        np.copyto(self._now, self._values)
        self._places, self._passed = [], 0
        self.epoch += 1
        visit = self.forecast.current
        if visit is not None:
            places = self._here.nonzero()[0]
            places = places[places > self.cursor]
            self._places, self._place_ids = places.tolist(), self._ids_of(visit, places)
            self._now[self._place_ids] = self.forecast.time + places[:, None] / len(self._here)
        self._current = True

    def _pass(self) -> None:
        """Pages that the visit has passed are used again in a later one."""
        passed = bisect.bisect_right(self._places, self.cursor, self._passed)
        if passed > self._passed:
            ids = self._place_ids[self._passed : passed]
            self._now[ids] = self._values[ids]
            self._passed = passed

    def _ids_of(self, visit: Visit, places: np.ndarray) -> np.ndarray:
        """``[pages, planes]`` page ids of pages (numbers in the module) of a visit."""
        first = self._numbering.entries[visit.module].first_index
        planes = np.array([int(plane) for plane in visit.planes], dtype=np.int64)
        ids: np.ndarray = (first + places[:, None]) * NUM_PLANES + planes
        return ids

    def _refresh(self, entry: ModuleEntry, planes: Sequence[Plane]) -> None:
        experts = self.experts(entry.module)
        coming = self.forecast.coming_to(entry.module)
        horizon = HORIZON_VISITS * len(self._numbering.entries)
        length, now = max(1, self.forecast.length), self.forecast.time
        use = expected_use(experts, planes[0], coming, length=length, now=now, horizon=horizon)
        fractions = self._fractions.get(entry.module)
        if fractions is None:
            fractions = self._fractions[entry.module] = np.arange(entry.num_pages) / entry.num_pages
        times = (use if entry.num_slices == 1 else np.repeat(use, entry.num_slices)) + fractions
        np.minimum(times, FAR, out=times)  # where nothing is known, places say nothing either
        for plane in planes:
            start = entry.first_index * NUM_PLANES + int(plane)
            self._values[start : start + entry.num_pages * NUM_PLANES : NUM_PLANES] = times

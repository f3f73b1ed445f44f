"""What sweeps announce as they go: visits and progress for the outlook and observers, and the pages to fetch ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megascale_omni.paging.forecast import Visit
from megascale_omni.paging.leases import PagedModule
from megascale_omni.paging.observe import Observer
from megascale_omni.paging.outlook import Outlook
from megascale_omni.paging.pager import Pager
from megascale_omni.paging.planes import NUM_PLANES, Plane
from megascale_omni.paging.residency import pages_ahead, probable_experts
from megascale_omni.paging.work import STATE, wanted_here
from megascale_omni.schedule import Phase

if TYPE_CHECKING:
    from megascale_omni.paging.upkeep import Upkeep

SWEEP_AHEAD = 16
"""Pages that a sweep page by page looks ahead."""


class Sweeper(Protocol):
    """What is needed of the manager."""

    pager: Pager
    outlook: Outlook
    observers: list[Observer]
    upkeep: Upkeep

    @property
    def modules(self) -> tuple[PagedModule, ...]:
        """All modules by id."""
        ...

    @property
    def prefetches(self) -> bool:
        """Whether pages are fetched before they are needed."""
        ...


class Visits:
    """The visits of one manager's sweeps."""

    def __init__(self, manager: Sweeper) -> None:
        self._manager = manager
        self.in_host: tuple[Plane, ...] = ()
        """Planes whose pages decide, where they lie in host memory, that a page is stepped there."""
        self._asks: tuple[tuple[int, int], int] = (0, 0), 0  # (slots, pages always asked for), and what follows
        self._next: tuple[int, Visit | None, np.ndarray] = -1, None, np.zeros(0, dtype=np.int64)

    def begin(self, module: PagedModule, phase: Phase, planes: Sequence[Plane], pages: np.ndarray) -> None:
        """A sweep over ``pages`` (numbers from 0 in the module) begins."""
        visit = Visit(phase, module.entry.module, tuple(planes))
        for observer in self._manager.observers:
            observer.visited(visit, pages)
        if self._manager.pager.can_evict:
            self._manager.pager.poll()
            self._manager.upkeep.look()
            self._manager.outlook.begin(visit, pages)

    def reached(self, module: PagedModule, name: tuple[int, int]) -> None:
        """It works on a page, (expert, slice)."""
        page = name[0] * module.entry.num_slices + name[1]
        for observer in self._manager.observers:
            observer.reached(page)
        if self._manager.pager.can_evict:
            self._manager.outlook.reached(page)

    def ask(self, module: PagedModule, coming: np.ndarray, *, planes: Sequence[Plane] = STATE) -> None:
        """Asks for the pages ``coming``, which are in the order of need, and for the start of the next visit.

        The current group must be leased: what it has been read for is the farthest use there is. Of ``planes``, pages
        that lie in host memory and will be worked on there are left there.
        """
        pager = self._manager.pager
        if not (pager.can_evict and self._manager.prefetches):
            return
        room = self._room(module)
        parts, found = [], 0
        for start in range(0, len(coming), 2 * room):  # all at once, pages that are not there yet included
            part = coming[start : start + 2 * room]
            part = wanted_here(pager.table, part, deciding=self.in_host, planes=planes)[: room - found]
            parts.append(part)
            found += len(part)
            if found >= room:
                break
        if found < room:
            parts.append(self._next_visit_pages(room - found))
        wanted = np.concatenate(parts) if len(parts) > 1 else parts[0]
        if len(wanted):
            pager.prefetch(wanted)

    def _room(self, module: PagedModule) -> int:
        """How many pages to ask for."""
        pager = self._manager.pager
        slots = min((pager.tiers.device.limit(c) or 0) for c in module.slot_classes)
        key = slots, pager.pace.ahead()
        if self._asks[0] != key:
            self._asks = key, pages_ahead(slots, always=key[1])
        return self._asks[1]

    def _next_visit_pages(self, count: int) -> np.ndarray:
        """Pages that the next visit will probably use."""
        outlook = self._manager.outlook
        visit = outlook.forecast.next_visit
        if visit is None:
            return np.zeros(0, dtype=np.int64)
        entry = self._manager.modules[visit.module].entry
        stamp, known, found = self._next
        if stamp != outlook.stamp or known is not visit:
            experts = probable_experts(outlook.probable(visit.module))
            first = entry.first_index + experts[:, None] * entry.num_slices + np.arange(entry.num_slices)
            numbers = np.array([int(plane) for plane in visit.planes], dtype=np.int64)
            found = (first.reshape(-1, 1) * NUM_PLANES + numbers).reshape(-1)
            self._next = outlook.stamp, visit, found
        nearest = found[: count * entry.num_slices * len(visit.planes)]  # of so many experts
        planes = tuple(Plane) if visit.phase is Phase.STEP else STATE
        return wanted_here(self._manager.pager.table, nearest, deciding=self.in_host, planes=planes)[:count]

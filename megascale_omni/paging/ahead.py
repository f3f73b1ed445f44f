"""Pages that are asked for before they are needed, and loaded as room appears."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np

from megascale_omni.paging.flights import FlightKind, Flights
from megascale_omni.paging.outlook import Outlook
from megascale_omni.paging.pace import Pace
from megascale_omni.paging.residency import displaced_before
from megascale_omni.paging.table import PageTable
from megascale_omni.paging.tiers import HOST, Arena


class Loads(Protocol):
    """Who starts loads."""

    def is_away(self, page_id: int) -> bool:
        """Whether a page is neither in the device arena nor on its way."""
        ...

    def load(self, page_id: int, *, ahead: float) -> bool:
        """Starts a load where pages used after the time ``ahead`` make room; whether it did."""
        ...


class Ahead:
    """What is asked for, in the order of need. ``flights`` are the pager's, ``loader`` starts loads."""

    def __init__(
        self,
        table: PageTable,
        device: Arena,
        outlook: Outlook,
        *,
        flights: Flights,
        pace: Pace,
        loader: Loads,
    ) -> None:
        self._table, self._device, self._outlook = table, device, outlook
        self._flights = flights
        self._pace, self._loader = pace, loader
        self._wanted: deque[tuple[int, int]] = deque()  # (place in the order of need, page)
        self.stuck = False
        """Whether asking has failed, and nothing happened since that could change it."""

    def ask(self, page_ids: np.ndarray) -> None:
        """These pages are wanted, and no others any more."""
        away = (self._table.tier[page_ids] >= HOST).nonzero()[0]
        pairs = zip(away.tolist(), page_ids[away].tolist(), strict=True)
        self._wanted = deque((n, p) for n, p in pairs if not self._flights.is_coming(p))
        self.stuck = False

    def forget(self) -> None:
        """Nothing is wanted any more."""
        self._wanted.clear()

    def waiting(self) -> list[int]:
        """What is wanted and has not been loaded, the one needed first first."""
        return [page_id for _, page_id in self._wanted]

    def is_idle(self) -> bool:
        """Whether there is nothing to do; forgets what has come."""
        wanted = self._wanted
        while wanted and not self._loader.is_away(wanted[0][1]):
            wanted.popleft()
        return not wanted

    def serve(self, *, keep: frozenset[int]) -> None:
        """Starts loads as far as there is room; pages in ``keep`` are being brought and do not leave."""
        wanted, loader = self._wanted, self._loader
        always = self._pace.ahead()
        while wanted:
            number, page_id = wanted[0]
            if loader.is_away(page_id):
                before = np.inf  # where there is room, nobody need leave, and nobody asks when what is used
                slot_class = self._table.slot_class(page_id)
                if not self._device.has_room(slot_class):
                    # There is room once one of those that leave has left.
                    if self._flights.jobs(slot_class, FlightKind.LEAVING, but=keep):
                        self.stuck = True
                        return
                    self._outlook.update()
                    before = self._outlook.use_at[page_id]
                    if number >= always:
                        held_until = self._held_until(self._table.class_at[page_id])
                        before = displaced_before(number, before, held_until, always=always)
                if not loader.load(page_id, ahead=before):
                    self.stuck = True
                    return
            wanted.popleft()

    def _held_until(self, class_index: int) -> float:
        """The latest next use of the pages of a class that leases hold."""
        classes, uses = self._table.class_at, self._outlook.use_at
        return max((uses[p] for p in self._table.held if classes[p] == class_index), default=-np.inf)

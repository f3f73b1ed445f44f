"""Pages on their way, and the places that they can be in. See [Note: life of a page]."""

from __future__ import annotations

import enum
from collections.abc import Callable, Container
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

from megascale_omni.bulk import TORCH, Bulk
from megascale_omni.paging.copies import Copier
from megascale_omni.paging.disk import DiskFile
from megascale_omni.paging.layout import SlotClass
from megascale_omni.paging.mover import Mover
from megascale_omni.paging.table import PageTable
from megascale_omni.paging.tiers import Arena, TierKind


class FlightKind(enum.Enum):
    """Which way a page is going."""

    LOADING = "loading"
    LEAVING = "leaving"
    SINKING = "writing behind"  # from host memory to disk
    RISING = "reading ahead"  # from disk to host memory


@dataclass
class Flight:
    """A page on its way: its job, the slot it goes to, and (all but LOADING) where its bytes go."""

    kind: FlightKind
    future: Future[None]
    slot: int
    target: TierKind = TierKind.DEVICE


@dataclass(frozen=True)
class Tiers:
    """The places pages can be in. ``host`` has no slots and ``disk`` is None where everything is resident."""

    device: Arena
    host: Arena
    disk: DiskFile | None
    mover: Mover | None
    copier: Copier
    bulk: Bulk = TORCH
    checks: bool = True
    """Whether pages have checksums."""


class Flights(dict[int, Flight]):
    """All pages on their way, by id. ``land`` is told what ended: (page, whether a leaving page is to stay)."""

    def __init__(self, table: PageTable, mover: Mover | None, *, land: Callable[[int, bool], None]) -> None:
        super().__init__()
        self._table, self._mover, self._land = table, mover, land
        self._reaped = 0  # jobs that had ended when flights were looked through last

    def jobs(self, slot_class: SlotClass, kind: FlightKind, *, but: Container[int]) -> list[Future[None]]:
        """Jobs of a class and kind, after which a slot may become free; not those of the pages ``but``."""
        return [
            flight.future
            for page_id, flight in self.items()
            if flight.kind is kind and page_id not in but and self._table.slot_class(page_id) == slot_class
        ]

    def slots(self) -> list[tuple[int, int, TierKind]]:
        """Slots taken by flights: (page, slot, tier the page is going to); a page going to disk takes none."""
        return [(page_id, flight.slot, flight.target) for page_id, flight in self.items() if flight.slot >= 0]

    def is_coming(self, page_id: int) -> bool:
        """Whether a page is on its way to the device, or has not left it."""
        flight = self.get(page_id)
        return flight is not None and flight.kind in (FlightKind.LOADING, FlightKind.LEAVING)

    def reap(self, *, stay: Container[int]) -> None:
        """Takes back the jobs that have ended; of leaving pages those of ``stay`` stay."""
        ended = 0 if self._mover is None else self._mover.ended  # first: one that ends meanwhile is seen the next time
        if ended == self._reaped:
            return
        for page_id in [p for p, flight in self.items() if flight.future.done()]:
            self._land(page_id, page_id in stay)
        self._reaped = ended  # not where one has failed: the others are looked at again

    def finish(self, page_id: int) -> None:
        """Waits for a page's flight; a leaving page stays in the device arena."""
        assert self._mover is not None
        flight = self[page_id]
        while not flight.future.done():
            what = f"{flight.kind.value} the {self._table.numbering.describe(page_id)}"
            self._mover.wait_any([flight.future], what=what)
        self._land(page_id, True)


def error_of(future: Future[None]) -> BaseException | None:
    """What went wrong in a job that has ended."""
    return CancelledError("the pages were closed meanwhile") if future.cancelled() else future.exception()

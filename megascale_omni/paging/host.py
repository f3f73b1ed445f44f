"""The host arena between device and disk: who stays in it, and who goes on to the disk before room is needed.

[Note: host tier]
A page that leaves the device goes to host memory where it is sooner needed than one that is there; that one *sinks* to
disk. A page is in one tier only: one that is loaded gives its host slot back. Sinking a clean page costs nothing and
makes room at once. A dirty one is written from its host slot, and stays where it is while that lasts; so a few slots
are kept free by writing behind, those first that are needed last [Note: pace]. Where there is no room all the same, the
page that leaves goes to disk itself.

What is asked for ahead and has no room in the device arena yet is read from disk into host memory: into slots that
writing behind need not keep free, or in the place of a clean page that is needed later. From there it comes over the
link, which is faster. One reader is left free, lest a page that is waited for stands in a queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import torch

from megascale_omni.paging.compaction import ordered_moves
from megascale_omni.paging.flights import Flight, FlightKind, Tiers
from megascale_omni.paging.layout import SlotClass
from megascale_omni.paging.outlook import Outlook
from megascale_omni.paging.pace import Pace
from megascale_omni.paging.table import PageTable
from megascale_omni.paging.tiers import ABSENT, HOST, TierKind

MOST_RISING = 1
"""Pages that are read ahead from disk to host memory at once: a reader is left to pages that are waited for."""


class HostTier:
    """Decides about the host arena's slots.

    ``flights`` are the pager's, ``finish`` waits for one of them, ``keep`` are pages that are being brought together.
    """

    def __init__(
        self,
        table: PageTable,
        tiers: Tiers,
        outlook: Outlook,
        *,
        flights: dict[int, Flight],
        counts: Counter[str],
        pace: Pace,
        finish: Callable[[int], None],
        keep: Callable[[], frozenset[int]],
    ) -> None:
        self._table, self._tiers, self._outlook = table, tiers, outlook
        self._flights, self._counts, self._pace, self._finish, self._keep = flights, counts, pace, finish, keep
        self._lent: Counter[int] = Counter()

    # -- pages that are worked on here ---------------------------------------------------------------------------------

    @property
    def lent(self) -> frozenset[int]:
        """Pages that somebody works on where they lie: none of them may move or be written out."""
        return frozenset(self._lent)

    def is_lent(self, page_id: int) -> bool:
        """Whether somebody works on a page where it lies."""
        return page_id in self._lent

    def lend(self, page_ids: np.ndarray, *, where: np.ndarray) -> dict[int, torch.Tensor]:
        """Whole slots of those pages that lie here, to be worked on until they are given back; none of them unless all
        pages ``where`` lie here. Waits for what is being written out of them.
        """
        if not len(where) or (self._table.tier[where] != HOST).any():
            return {}
        for page_id in page_ids.tolist():
            if page_id in self._flights and self._flights[page_id].kind is FlightKind.SINKING:
                self._finish(page_id)
        if any(page_id in self._flights for page_id in where.tolist()):
            return {}  # on its way to the device
        here = [p for p in page_ids.tolist() if self._table.tier[p] == HOST and p not in self._flights]
        self._lent.update(here)
        return {p: self._tiers.host.tensor(self._table.slot_class(p), int(self._table.slot[p])) for p in here}

    def take_back(self, page_ids: Iterable[int]) -> None:
        """Ends one loan of each page."""
        self._lent.subtract(list(page_ids))  # a mapping would count by its values
        self._lent = +self._lent

    def admit(self, page_id: int) -> int | None:
        """A slot for a page that leaves the device; None: it should go on to disk."""
        slot_class, arena = self._table.slot_class(page_id), self._tiers.host
        if not arena.limit(slot_class):
            return None
        if not arena.has_room(slot_class):
            for other in self._farthest(slot_class, count=1).tolist():
                if not self._table.dirty[other] and self._later(other, page_id):
                    self._sunk(other)
        slot = arena.allocate(slot_class) if arena.has_room(slot_class) else None
        self._write_behind(slot_class)
        return slot

    @property
    def has_slots(self) -> bool:
        """Whether there is a host arena at all."""
        return any(self._tiers.host.limit(slot_class) for slot_class in self._tiers.host.slot_classes())

    def read_ahead(self, wanted: Iterable[int]) -> None:
        """Starts to read pages that the device has no room for; ``wanted`` is the order of need."""
        rising = sum(flight.kind is FlightKind.RISING for flight in self._flights.values())
        for page_id in wanted:
            if self._table.tier[page_id] != TierKind.DISK or page_id in self._flights:
                continue
            slot = self._slot_ahead(page_id) if rising < MOST_RISING else None
            if slot is None:
                return
            self._rise(page_id, slot)
            rising += 1

    def _slot_ahead(self, page_id: int) -> int | None:
        """A slot for a page that is read ahead; None: those that are there are needed more."""
        slot_class, arena = self._table.slot_class(page_id), self._tiers.host
        limit = arena.limit(slot_class) or 0
        if not limit:
            return None
        if limit - arena.used(slot_class) <= self._pace.behind(limit):
            others = self._farthest(slot_class, count=1).tolist()
            if not others or self._table.dirty[others[0]] or not self._later(others[0], page_id):
                return None
            self._sunk(others[0])
        return arena.allocate(slot_class) if arena.has_room(slot_class) else None

    def _rise(self, page_id: int, slot: int) -> None:
        slot_class, offset = self._table.slot_class(page_id), int(self._table.disk_offset[page_id])
        held, disk, mover = self._tiers.host.tensor(slot_class, slot), self._tiers.disk, self._tiers.mover
        assert disk is not None
        assert mover is not None

        def read() -> None:
            self._tiers.copier.vacant(held)
            disk.read(offset, held, name=lambda: self._table.numbering.describe(page_id))

        future = mover.read(self._pace.reading(read))
        self._flights[page_id] = Flight(FlightKind.RISING, future, slot, TierKind.HOST)
        self._counts["pages_read_ahead"] += 1
        self._counts["bytes_read_ahead"] += slot_class.nbytes

    def _later(self, page_id: int, than: int) -> bool:
        """Whether a page is needed later than another; of equals, the one used longer ago is."""
        one, other = self._outlook.next_use(np.array([page_id, than])).tolist()
        return bool(one > other or (one == other and self._table.last_use[page_id] < self._table.last_use[than]))

    def _farthest(self, slot_class: SlotClass, *, count: int) -> np.ndarray:
        """Pages in the host arena that are not on their way, the one needed last first."""
        table = self._table
        ids = np.nonzero((table.tier == HOST) & (table.class_index == table.index_of(slot_class)))[0]
        busy = self._flights.keys() | self._keep() | self._lent.keys()
        if busy:
            ids = ids[~np.isin(ids, np.fromiter(busy, dtype=np.int64, count=len(busy)))]
        order = np.lexsort((table.last_use[ids], table.dirty[ids], -self._outlook.next_use(ids)))
        found: np.ndarray = ids[order[:count]]
        return found

    def _write_behind(self, slot_class: SlotClass) -> None:
        arena = self._tiers.host
        limit = arena.limit(slot_class) or 0
        free = limit - arena.used(slot_class) + self._soon_free(slot_class)
        short = self._pace.behind(limit) - free
        if short <= 0 or self._holds_all(slot_class):
            return
        for page_id in self._farthest(slot_class, count=short).tolist():
            self._sink(page_id)

    def _holds_all(self, slot_class: SlotClass) -> bool:
        """Whether both arenas have room for all pages that there are now: nothing ever needs the disk."""
        table = self._table
        pages = np.count_nonzero((table.tier != ABSENT) & (table.class_index == table.index_of(slot_class)))
        room = (self._tiers.device.limit(slot_class) or 0) + (self._tiers.host.limit(slot_class) or 0)
        return int(pages) <= room

    def _soon_free(self, slot_class: SlotClass) -> int:
        """Slots of pages that are on their way out of host memory, to disk or to the device."""
        table = self._table
        return sum(
            flight.kind is not FlightKind.LEAVING
            and bool(table.tier[page_id] == HOST)
            and table.slot_class(page_id) == slot_class
            for page_id, flight in self._flights.items()
        )

    def _sink(self, page_id: int) -> None:
        """Lets a page go on to disk: at once where its bytes are there, else by a write."""
        if not self._table.dirty[page_id]:
            self._sunk(page_id)
            return
        slot_class, slot = self._table.slot_class(page_id), int(self._table.slot[page_id])
        held, offset = self._tiers.host.tensor(slot_class, slot), int(self._table.disk_offset[page_id])
        disk, mover = self._tiers.disk, self._tiers.mover
        assert disk is not None
        assert mover is not None

        def write() -> None:
            disk.write(offset, held, name=lambda: self._table.numbering.describe(page_id))

        self._flights[page_id] = Flight(FlightKind.SINKING, mover.write(self._pace.writing(write)), -1, TierKind.DISK)
        self._counts["bytes_written"] += slot_class.nbytes

    def landed(self, page_id: int, *, stay: bool) -> None:
        """A page's write from host memory has ended; where it is wanted it stays, clean."""
        self._table.dirty[page_id] = False
        if not stay:
            self._sunk(page_id)

    def _sunk(self, page_id: int) -> None:
        slot_class, slot = self._table.slot_class(page_id), int(self._table.slot[page_id])
        self._table.move(page_id, tier=TierKind.DISK, slot=-1)
        self._tiers.host.free(slot_class, slot)
        self._counts["pages_sunk"] += 1

    def shrink(self, slot_class: SlotClass, *, tight: bool = False) -> int:
        """Brings the arena down to its limit: pages sink, those needed last first, the others move together.

        Returns the bytes that went back to the system. ``tight``: all memory that no page needs returns, and pages lie
        in order [Note: compaction]. Waits for what is written.
        """
        if self._lent:
            raise RuntimeError("host memory shrinks while pages in it are worked on")
        self._tiers.copier.settle()  # a slot that is free may be read by a copy that goes on
        arena, table = self._tiers.host, self._table
        limit = arena.limit(slot_class)
        while limit is not None and arena.used(slot_class) > limit:
            excess = arena.used(slot_class) - limit
            for page_id in self._farthest(slot_class, count=excess).tolist():
                self._sink(page_id)
            for page_id in [p for p in self._flights if table.slot_class(p) == slot_class]:
                self._finish(page_id)
                if table.tier[page_id] == HOST and arena.used(slot_class) > limit:
                    self._sink(page_id)  # what waiting has left there, clean
        ids = np.nonzero((table.tier == HOST) & (table.class_index == table.index_of(slot_class)))[0]
        owners = dict(zip(table.slot[ids].tolist(), ids.tolist(), strict=True))
        taken = {flight.slot for flight in self._flights.values() if flight.target is TierKind.HOST}
        still = taken | {slot for slot, page_id in owners.items() if page_id in self._flights}
        if tight:
            moves = ordered_moves(arena, slot_class, {s: page for s, page in owners.items() if s not in still})
        else:
            moves = [(owners[source], target) for source, target in arena.moves_to_compact(slot_class, still)]
        for page_id, target in moves:
            source = int(table.slot[page_id])
            arena.take(slot_class, target)
            arena.tensor(slot_class, target).copy_(arena.tensor(slot_class, source))
            table.shift(page_id, target)
            arena.free(slot_class, source)
        return arena.trim(slot_class, tight=tight)

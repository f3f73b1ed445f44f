"""The pager: brings pages to the device arena and lets others leave, as the policy says.

[Note: life of a page]
    ABSENT --create--> DEVICE --evict--> HOST or DISK --load--> DEVICE ...            (tier column)
A page on its way has a *flight*: LOADING (a slot is taken, bytes are coming; its tier is still the slow one), LEAVING
(bytes are being saved; its tier is still DEVICE and its bytes are whole, but nobody may write them), SINKING (the
same, from HOST to DISK) or RISING (read ahead, from DISK to HOST). A page that is wanted while it is leaving or sinking
stays where it is once the save has ended. ``dirty`` says that the disk does not hold the current bytes; a clean page
leaves without a write. All of this happens on the main thread; io threads only move bytes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from megascale_omni.paging.ahead import Ahead
from megascale_omni.paging.compaction import compact
from megascale_omni.paging.copies import CopyJob
from megascale_omni.paging.departures import Departures
from megascale_omni.paging.disk import PageIoError
from megascale_omni.paging.flights import Flight, FlightKind, Flights, Tiers, error_of
from megascale_omni.paging.host import HostTier
from megascale_omni.paging.layout import SlotClass
from megascale_omni.paging.outlook import Outlook
from megascale_omni.paging.pace import Pace
from megascale_omni.paging.readers import copy_of
from megascale_omni.paging.shadow import Shadows
from megascale_omni.paging.table import PageTable
from megascale_omni.paging.tiers import DEVICE, HOST, TierKind
from megascale_omni.paging.victims import MOST_CHANGES, Victims

logger = logging.getLogger(__name__)


class Pager:
    """Moves pages between tiers. See [Note: life of a page]."""

    def __init__(self, table: PageTable, tiers: Tiers, outlook: Outlook) -> None:
        self.table = table
        self.tiers = tiers
        self.outlook = outlook
        self.shadows = Shadows(table.slot_class, tiers.device.limit_of)
        self.counts: Counter[str] = Counter()
        self._tensors: dict[int, torch.Tensor] = {}
        self.flights = Flights(table, tiers.mover, land=self._land)
        self._keep: frozenset[int] = frozenset()
        self.victims = Victims(table, outlook, self.shadows, flying=self.flights, keep=lambda: self._keep)
        self.pace = Pace()
        self._ahead = Ahead(
            table,
            tiers.device,
            outlook,
            flights=self.flights,
            pace=self.pace,
            loader=self,
        )
        self.host = HostTier(
            table,
            tiers,
            outlook,
            flights=self.flights,
            counts=self.counts,
            pace=self.pace,
            finish=self.flights.finish,
            keep=lambda: self._keep,
        )
        self.departures = Departures(
            table,
            tiers,
            flights=self.flights,
            victims=self.victims,
            shadows=self.shadows,
            host=self.host,
            pace=self.pace,
            counts=self.counts,
            keep=lambda: self._keep,
            on_left=self._left,
        )
        self._clock = 0
        self.on_move: Callable[[int], None] = lambda page_id: None

    # -- what others see -----------------------------------------------------------------------------------------------

    @property
    def can_evict(self) -> bool:
        """Whether pages ever leave; without a disk everything stays."""
        return self.tiers.disk is not None

    def tensor(self, page_id: int) -> torch.Tensor:
        """The whole slot of a page in the device arena."""
        return self._tensors[page_id]

    def copy(self, page_id: int) -> torch.Tensor:
        """See :func:`megascale_omni.paging.readers.copy_of`. On any thread."""
        return copy_of(page_id, self.table, self.tiers)

    def create(self, page_id: int) -> None:
        """Gives an absent page a slot; contents are undefined."""
        slot_class = self.table.slot_class(page_id)
        if self.can_evict:
            self.shadows.of_page(page_id).create(page_id, pinned=self.table.is_pinned)
        slot = self.departures.take_slot(slot_class, wait=True)
        assert slot is not None
        self.tiers.copier.created(self.tiers.device.tensor(slot_class, slot))
        self.table.place(page_id, tier=TierKind.DEVICE, slot=slot)
        self.table.dirty[page_id] = True
        self._arrived(page_id, slot)
        self.counts["pages_created"] += 1

    def drop(self, page_id: int) -> None:
        """Makes an unpinned page absent, wherever it is; its contents are gone."""
        if page_id in self.flights:
            self.flights.finish(page_id)
        tier, slot_class = self.table.tier_at[page_id], self.table.slot_class(page_id)
        slot = self.table.remove(page_id)
        if tier == DEVICE:
            self._left(page_id)
            self.tiers.device.free(slot_class, slot)
        elif tier == HOST:
            self.tiers.host.free(slot_class, slot)
        self.shadows.drop(page_id)
        self._ahead.stuck = False  # also where it was not here
        self.counts["pages_dropped"] += 1

    def ensure(self, page_ids: np.ndarray) -> None:
        """Brings pages to the device arena and waits for them.

        Raises:
            PageIoError: bytes could not be read, or are not those written. RuntimeError: a page is absent; no room, all
                is pinned.
        """
        if not self.can_evict:
            return
        self._clock += 1
        self.table.check_present(page_ids)
        self.table.last_use[page_ids] = self._clock
        self.pace.wanted(len(page_ids))
        self._bring(page_ids)
        self.pace.served()

    def release(self, page_ids: np.ndarray) -> None:
        """Takes a pin from each page: those that nobody else holds may leave."""
        self.table.unpin(page_ids)
        if self.can_evict:
            self.victims.changed += page_ids.tolist()
            if len(self.victims.changed) > MOST_CHANGES:
                self.victims.forget()

    def _bring(self, page_ids: np.ndarray) -> None:
        away = page_ids[self.table.tier[page_ids] != DEVICE].tolist()
        missing = [p for p in away if not self.flights.is_coming(p)] if self.flights else away
        self.shadows.use(page_ids, here=lambda p: p not in missing, pinned=self.table.is_pinned)
        flying = [p for p in page_ids.tolist() if p in self.flights] if self.flights else []
        if not away and not flying:
            return
        self._keep = frozenset(page_ids.tolist())
        try:
            for page_id in away:
                if page_id in self.flights and not self.flights.is_coming(page_id):
                    self.flights.finish(page_id)  # it is in host memory then
                if self.is_away(page_id):  # making room for the one before may have landed this one
                    self.counts["page_faults"] += 1
                    self.load(page_id, ahead=None)
            for page_id in self._keep & self.flights.keys():
                self.flights.finish(page_id)
            if not self._ahead.stuck:
                self._serve()  # while these pages are kept: they are pinned only after this call
        finally:
            self.victims.changed += self._keep
            self._keep = frozenset()

    def prefetch(self, page_ids: Sequence[int] | np.ndarray) -> None:
        """Starts loading pages as far as there is room, without waiting; the rest follows as room appears."""
        if self.can_evict:
            self._ahead.ask(np.asarray(page_ids, dtype=np.int64))
            self._reap()
            self._serve()  # a sweep has gone on: pages were given back

    def _serve(self) -> None:
        if not self._ahead.is_idle():
            self._reap()
            self._ahead.serve(keep=self._keep)
            if self._ahead.stuck and self.host.has_slots:
                self.host.read_ahead(self._ahead.waiting())

    def poll(self) -> None:
        """Takes back the jobs that have ended. Raises what went wrong in any of them, whether a page waits or not."""
        if self.flights:
            self._reap()

    def settle(self) -> None:
        """Waits until nothing is on its way."""
        self._ahead.forget()
        for page_id in list(self.flights):
            self.flights.finish(page_id)
        self.tiers.copier.settle()

    def land(self) -> None:
        """Waits until nothing is on its way; pages that are leaving leave. What is asked for stays asked for."""
        while self.flights:
            assert self.tiers.mover is not None
            futures = [flight.future for flight in self.flights.values()]
            self.tiers.mover.wait_any(futures, what="bringing pages to rest")
            self._reap()

    def evict_down(self, slot_class: SlotClass) -> None:
        """Lets pages of a class leave until it is within its limit, and returns the memory."""
        limit = self.tiers.device.limit(slot_class)
        self.shadows.of(slot_class).restart(())  # who leaves now is no page-in of anybody
        while limit is not None and self.tiers.device.used(slot_class) > limit:
            self.departures.make_room(slot_class, wait=True)
        self.restart_shadow(slot_class)
        self.tiers.copier.settle()  # memory that is given back is nobody's
        self.tiers.device.trim(slot_class)

    def restart_shadow(self, slot_class: SlotClass) -> None:
        """The arena of a class has another size: LRU begins anew with what is there."""
        table = self.table
        here = np.nonzero((table.tier == DEVICE) & (table.class_index == table.index_of(slot_class)))[0]
        self.shadows.of(slot_class).restart(here[np.argsort(table.last_use[here])].tolist())

    def relocate(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copies pages that are here, free of leases and not on their way, to free slots of their class: at once."""
        device, pairs = self.tiers.device, []
        for page_id, slot in moves:
            slot_class = self.table.slot_class(page_id)
            device.take(slot_class, slot)
            pairs.append((device.tensor(slot_class, int(self.table.slot[page_id])), device.tensor(slot_class, slot)))
        self.tiers.bulk.copy(pairs)
        # Whatever comes to the slots that are left waits for these copies.
        self.tiers.copier.released([slot for pair in pairs for slot in pair])
        for page_id, slot in moves:
            slot_class, source = self.table.slot_class(page_id), int(self.table.slot[page_id])
            self._left(page_id)
            self.table.shift(page_id, slot)
            device.free(slot_class, source)
            self._arrived(page_id, slot)
        self.counts["pages_moved"] += len(moves)

    def compact(self, slot_class: SlotClass, *, tight: bool = False) -> int:
        """See :func:`megascale_omni.paging.compaction.compact`."""
        return compact(self, slot_class, tight=tight)

    # -- loading -------------------------------------------------------------------------------------------------------

    def is_away(self, page_id: int) -> bool:
        """Whether a page exists and is neither in the device arena, nor on its way, nor worked on in host memory."""
        away = self.table.tier_at[page_id] >= HOST and page_id not in self.flights
        return away and not self.host.is_lent(page_id)

    def load(self, page_id: int, *, ahead: float | None) -> bool:
        """Starts a load, waiting for room; or, ``ahead`` of need, only where pages used after that time make some.

        Returns whether it did.
        """
        slot_class = self.table.slot_class(page_id)
        shadow = self.shadows.of_page(page_id)
        if ahead is None:
            shadow.loaded(page_id)
            slot = self.departures.take_slot(slot_class, wait=True)
        elif not shadow.load_ahead(page_id):
            return False
        else:
            slot = self.departures.take_slot(slot_class, wait=False, needed_before=ahead)
        if slot is None:
            shadow.not_loaded(page_id)
            return False
        target = self.tiers.device.tensor(slot_class, slot)
        mover = self.tiers.mover
        assert mover is not None
        if self.table.tier_at[page_id] == HOST:
            held = self.tiers.host.tensor(slot_class, self.table.slot_at[page_id])
            copier = self.tiers.copier
            copy = CopyJob(copier, (held, target), up=True)
            future = mover.read(self.pace.reading(copy) if copier.lands else copy)
        else:
            offset, disk = int(self.table.disk_offset[page_id]), self.tiers.disk
            assert disk is not None
            job = partial(self.tiers.copier.from_disk, disk, offset, target, name=lambda: self._name(page_id))
            future = mover.read(self.pace.reading(job))
        self.flights[page_id] = Flight(FlightKind.LOADING, future, slot)
        self.counts["pages_loaded"] += 1
        self.counts["bytes_loaded"] += slot_class.nbytes
        return True

    # -- flights -------------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        self.flights.reap(stay=self._keep)

    def _land(self, page_id: int, stay: bool) -> None:
        """A flight has ended; where it was a leaving page's, it is told whether it is to ``stay``."""
        flight, self._ahead.stuck = self.flights.pop(page_id), False
        slot_class = self.table.slot_class(page_id)
        error = error_of(flight.future)
        if flight.kind is FlightKind.LEAVING and (stay or error is not None):
            self.victims.changed.append(page_id)
        if error is not None:
            # The page is where it was before.
            if flight.slot >= 0:
                arena = self.tiers.device if flight.target is TierKind.DEVICE else self.tiers.host
                arena.free(slot_class, flight.slot)
            if isinstance(error, PageIoError):
                raise error
            raise RuntimeError(f"{flight.kind.value} the {self._name(page_id)} failed: {error!r}") from error
        match flight.kind:
            case FlightKind.LOADING:
                if self.table.tier_at[page_id] == HOST:
                    self.tiers.host.free(slot_class, self.table.slot_at[page_id])
                self.table.move(page_id, tier=TierKind.DEVICE, slot=flight.slot)
                self._arrived(page_id, flight.slot)
            case FlightKind.LEAVING:
                self.departures.landed(page_id, flight, stay=stay)
            case FlightKind.SINKING:
                self.host.landed(page_id, stay=stay)
            case FlightKind.RISING:
                self.table.move(page_id, tier=TierKind.HOST, slot=flight.slot)

    def _arrived(self, page_id: int, slot: int) -> None:
        self._tensors[page_id] = self.tiers.device.tensor(self.table.slot_class(page_id), slot)
        if self.can_evict:
            self.victims.changed.append(page_id)
        self.on_move(page_id)

    def _left(self, page_id: int) -> None:
        self._ahead.stuck = False
        self._tensors.pop(page_id, None)
        self.on_move(page_id)

    def _name(self, page_id: int) -> str:
        return self.table.numbering.describe(page_id)

    def close(self) -> None:
        """Ends io threads and removes the scratch file. Idempotent; errors that nobody has seen yet are logged."""
        self._ahead.forget()
        if self.tiers.mover is None or self.tiers.disk is None:
            return
        ended = self.tiers.mover.close()
        for page_id, flight in self.flights.items():
            error = error_of(flight.future) if flight.future.done() else None
            if error is not None and not flight.future.cancelled():
                logger.error("%s the %s failed: %s", flight.kind.value, self._name(page_id), error)
        if ended:
            self.tiers.disk.close()
            self.tiers.copier.settle()
            self.tiers.host.release()
        else:
            # Its file descriptor may become another file's, which the thread would then write to.
            logger.error("an io thread does not end: the scratch file in %s stays open", self.tiers.disk.folder)

"""How pages leave the device arena: who goes when room is needed, and the way out of each.

Whoever needs a slot makes room: pages begin to leave, several at once, in the order that the policy gives; a clean one
is gone at once, a dirty one when its bytes are in host memory or on disk. See [Note: life of a page].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from megascale_omni.paging.copies import CopyJob
from megascale_omni.paging.flights import Flight, FlightKind, Flights, Tiers
from megascale_omni.paging.host import HostTier
from megascale_omni.paging.layout import SlotClass
from megascale_omni.paging.pace import Pace
from megascale_omni.paging.residency import victims_at_once
from megascale_omni.paging.shadow import Shadows
from megascale_omni.paging.table import PageTable
from megascale_omni.paging.tiers import TierKind
from megascale_omni.paging.victims import Victims


class Departures:
    """Frees slots of the device arena. ``keep``: pages that are being brought together; ``on_left``: who has left."""

    def __init__(
        self,
        table: PageTable,
        tiers: Tiers,
        *,
        flights: Flights,
        victims: Victims,
        shadows: Shadows,
        host: HostTier,
        pace: Pace,
        counts: Counter[str],
        keep: Callable[[], frozenset[int]],
        on_left: Callable[[int], None],
    ) -> None:
        self._table, self._tiers = table, tiers
        self._flights, self._victims, self._shadows, self._host = flights, victims, shadows, host
        self._pace, self._counts, self._keep, self._on_left = pace, counts, keep, on_left

    def take_slot(self, slot_class: SlotClass, *, wait: bool, needed_before: float = -np.inf) -> int | None:
        """A slot of a class. Where none is free pages leave, and are waited for if ``wait``; or, where they take time
        or all are used before ``needed_before``, None.

        Raises:
            RuntimeError: leases hold all pages.
        """
        device = self._tiers.device
        while self._tiers.disk is not None and not device.has_room(slot_class):
            if not self.make_room(slot_class, wait=wait, needed_before=needed_before) and not wait:
                return None
        return device.allocate(slot_class)

    def make_room(self, slot_class: SlotClass, *, wait: bool, needed_before: float = -np.inf) -> bool:
        """One attempt to free slots of a class: reaps, evicts, waits. Whether there may be room now."""
        device, keep = self._tiers.device, self._keep()
        used = device.used(slot_class)
        self._flights.reap(stay=keep)
        if device.used(slot_class) < used:
            return True
        leaving = self._flights.jobs(slot_class, FlightKind.LEAVING, but=keep)
        count = victims_at_once(device.limit(slot_class) or 0) - len(leaving)
        if (wait and count > 0) or not leaving:
            chosen = self._victims.choose(slot_class, count=count, before=needed_before)
            if self._let_go(slot_class, chosen):
                return True
            if wait:
                leaving = self._flights.jobs(slot_class, FlightKind.LEAVING, but=keep)
        if not wait:
            return False
        # A page that is being loaded can leave once it is here. Those that are kept stay.
        jobs = leaving or self._flights.jobs(slot_class, FlightKind.LOADING, but=keep)
        if not jobs:
            raise RuntimeError(
                f"device arena: all {device.limit(slot_class)} slots of {slot_class} are held by leases at once; "
                "a larger --megascale-device-budget is needed"
            )
        assert self._tiers.mover is not None
        self._tiers.mover.wait_any(jobs, what=f"making room for a page of {slot_class.nbytes} bytes")
        self._flights.reap(stay=keep)
        return True

    def _let_go(self, slot_class: SlotClass, chosen: list[int]) -> bool:
        """Pages begin to leave, one after the other; where a clean one is gone at once, and true, the others stay."""
        shadow = self._shadows.of(slot_class)
        shadow.leave(chosen)
        for number, victim in enumerate(chosen):
            if self._start(victim):
                others = chosen[number + 1 :]
                self._victims.changed += others
                for page_id in others:
                    shadow.stayed(page_id)
                return True
        return False

    def evict(self, page_id: int, *, to_disk: bool = False) -> None:
        """Starts a page's way out; a clean page without a place in the host arena is gone at once."""
        self._shadows.of_page(page_id).leave((page_id,))
        self._start(page_id, to_disk=to_disk)

    def _start(self, page_id: int, *, to_disk: bool = False) -> bool:
        """The same, as far as bytes go. Whether it is gone."""
        table, tiers = self._table, self._tiers
        slot_class, slot = table.slot_class(page_id), table.slot_at[page_id]
        source, mover, disk = tiers.device.tensor(slot_class, slot), tiers.mover, tiers.disk
        assert mover is not None
        assert disk is not None
        tiers.copier.leaves(source)
        self._pace.left()
        host_slot = None if to_disk else self._host.admit(page_id)
        if host_slot is not None:
            held = tiers.host.tensor(slot_class, host_slot)
            future = mover.write(CopyJob(tiers.copier, (source, held), up=False))
            self._flights[page_id] = Flight(FlightKind.LEAVING, future, host_slot, TierKind.HOST)
        elif table.dirty_at[page_id]:
            offset, describe = int(table.disk_offset[page_id]), table.numbering.describe
            job = partial(tiers.copier.to_disk, disk, offset, source, name=partial(describe, page_id))
            future = mover.write(self._pace.writing(job))
            self._flights[page_id] = Flight(FlightKind.LEAVING, future, -1, TierKind.DISK)
            self._counts["bytes_written"] += slot_class.nbytes
        else:
            self._gone(page_id, TierKind.DISK, -1)
            return True
        return False

    def landed(self, page_id: int, flight: Flight, *, stay: bool) -> None:
        """A leaving page's bytes are safe where its flight went: it leaves, or, wanted meanwhile, is to ``stay``."""
        slot_class = self._table.slot_class(page_id)
        if flight.target is TierKind.DISK:
            self._table.dirty[page_id] = False
        if not stay:
            self._gone(page_id, flight.target, flight.slot)
            return
        self._shadows.of(slot_class).stayed(page_id)
        if flight.target is TierKind.HOST:
            self._tiers.host.free(slot_class, flight.slot)

    def _gone(self, page_id: int, target: TierKind, target_slot: int) -> None:
        """A page's bytes are safe elsewhere: its slot is free."""
        slot_class, slot = self._table.slot_class(page_id), self._table.slot_at[page_id]
        self._counts["pages_evicted"] += 1
        self._on_left(page_id)
        self._table.move(page_id, tier=target, slot=target_slot)
        self._tiers.device.free(slot_class, slot)

    def give_up(self, page_ids: Iterable[int], *, to_disk: bool) -> None:
        """Starts the way out of pages that may leave, all of them; a clean one is gone at once, without a copy."""
        for page_id in page_ids:
            self.evict(page_id, to_disk=to_disk or not self._table.dirty_at[page_id])

    def send_away(self, page_ids: np.ndarray) -> None:
        """Starts the way out of pages that are here, free of leases and not on their way; the others stay."""
        keep = self._keep()
        self._flights.reap(stay=keep)
        here = (self._table.tier[page_ids] == TierKind.DEVICE) & (self._table.pins[page_ids] == 0)
        for page_id in page_ids[here].tolist():
            if page_id not in self._flights and page_id not in keep:
                self._shadows.of_page(page_id).drop(page_id)  # LRU would have to do the same
                self.evict(page_id)

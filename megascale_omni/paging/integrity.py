"""The page table's invariants, checked by counting everything again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megascale_omni.paging.flights import FlightKind
from megascale_omni.paging.layout import SlotClass
from megascale_omni.paging.table import PageTable
from megascale_omni.paging.tiers import Arena, TierKind

if TYPE_CHECKING:
    from megascale_omni.paging.pager import Pager

AWAY = (TierKind.HOST, TierKind.DISK)


def check_integrity(table: PageTable, pager: Pager) -> None:
    """Raises RuntimeError, with the equation, unless

    slots used + slots free = capacity in each arena; no slot has two owners and every taken one has one; a pinned page
    is in the device arena; no pin count is negative, and pages held are those with pins; a page on disk is clean and
    has a place there; a page on its way comes from where its row says, and no lease holds it; a page that is worked on
    in host memory lies there and stays.
    """
    for arena in (pager.tiers.device, pager.tiers.host):
        arena.check_integrity()
        _check_owners(table, pager, arena)
    pinned_away = np.nonzero((table.pins > 0) & (table.tier != TierKind.DEVICE))[0]
    if len(pinned_away):
        raise RuntimeError(f"{table.numbering.describe(int(pinned_away[0]))} is pinned but not ACTIVE")
    if (table.pins < 0).any():
        raise RuntimeError("a page has a negative pin count")
    if sorted(table.held) != np.nonzero(table.pins)[0].tolist():
        raise RuntimeError(f"pages held = pages with pins does not hold: {len(table.held)} != {np.sum(table.pins > 0)}")
    lost = np.nonzero((table.tier == TierKind.DISK) & (table.dirty | (table.disk_offset < 0)))[0]
    if len(lost):
        raise RuntimeError(f"{table.numbering.describe(int(lost[0]))} is on disk, but its bytes there are not current")
    for page_id in pager.host.lent:
        if table.tier[page_id] != TierKind.HOST or page_id in pager.flights:
            raise RuntimeError(
                f"{table.numbering.describe(page_id)} is worked on in host memory but {table.state(page_id).value}"
            )
    for page_id, flight in pager.flights.items():
        kind = flight.kind
        right = {FlightKind.LEAVING: (TierKind.DEVICE,), FlightKind.SINKING: (TierKind.HOST,)}.get(kind, AWAY)
        if table.tier[page_id] not in right or table.pins[page_id]:
            raise RuntimeError(
                f"{table.numbering.describe(page_id)} is {kind.value} while it is {table.state(page_id).value} with "
                f"{table.pins[page_id]} leases"
            )


def _check_owners(table: PageTable, pager: Pager, arena: Arena) -> None:
    owners: dict[tuple[SlotClass, int], int] = {}

    def claim(page_id: int, slot: int) -> None:
        place = (table.slot_class(page_id), slot)
        if place in owners:
            names = f"{table.numbering.describe(owners[place])} and {table.numbering.describe(page_id)}"
            raise RuntimeError(f"slot {slot} of {place[0]} has two owners: {names}")
        owners[place] = page_id

    for page_id in np.nonzero(table.tier == arena.kind)[0].tolist():
        claim(page_id, int(table.slot[page_id]))
    for page_id, slot, target in pager.flights.slots():
        if target is arena.kind:
            claim(page_id, slot)
    for slot_class in arena.slot_classes():
        owned = sorted(slot for c, slot in owners if c == slot_class)
        if owned != arena.taken_slots(slot_class):
            raise RuntimeError(
                f"{arena.kind.name.lower()} arena, {slot_class}: slots owned by pages = slots taken does not hold: "
                f"{len(owned)} != {len(arena.taken_slots(slot_class))}"
            )

"""Compaction: pages of an arena move together, so that whole segments return to the system.

[Note: compaction]
There are two kinds. Where an arena has become smaller, as few pages move as empty the segments that are too many
(``Arena.moves_to_compact``). Where compaction itself is asked for, the memory of every segment that the pages do not
need returns, whatever the limit, and the pages that stay lie in order: plane after plane, module after module, the
slices of an expert one behind the other. A wave's pages are then one run of memory, which one copy moves. Segments come
back as pages do.

Pages that leases hold, or that are on their way, keep their slots; no page changes its tier or its bytes. Between two
moves every page has its bytes where the table says: another thread may copy pages meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megascale_omni.paging.layout import SlotClass
from megascale_omni.paging.planes import NUM_PLANES
from megascale_omni.paging.tiers import DEVICE, Arena, TierKind

if TYPE_CHECKING:
    from megascale_omni.paging.pager import Pager


def in_order(page_ids: Collection[int]) -> list[int]:
    """Pages as they lie after compaction: by plane, then module, expert and slice."""
    return sorted(page_ids, key=lambda page_id: (page_id % NUM_PLANES, page_id))


def moves_in_order(places: Mapping[int, int], wanted: Mapping[int, int], *, spare: int) -> list[tuple[int, int]]:
    """Moves (page, to slot) that bring pages from their slots ``places`` to those ``wanted``, one after the other.

    Every move goes to a slot that is free by then. ``spare`` is a free slot that nobody wants: where pages are in each
    other's way in a circle, one of them steps aside. Slots wanted are free, or those of pages that have a wish as well.
    """
    moves: list[tuple[int, int]] = []
    at = dict(places)
    waiting = {slot: page for page, slot in wanted.items() if places[page] != slot}  # by the slot that it waits for

    def fill(slot: int) -> None:
        while slot in waiting:
            page = waiting.pop(slot)
            moves.append((page, slot))
            slot, at[page] = at[page], slot

    taken = set(places.values())
    for slot in [slot for slot in waiting if slot not in taken]:
        fill(slot)
    while waiting:  # circles are left
        slot = next(iter(waiting))
        aside = next(page for page in waiting.values() if at[page] == slot)
        moves.append((aside, spare))
        at[aside] = spare
        fill(slot)
    return moves


def together(moves: Sequence[tuple[int, int]], places: Mapping[int, int]) -> list[list[tuple[int, int]]]:
    """Moves (page, to slot), which can be made one after the other, as few runs of moves that can be made at once.

    A slot is taken in a later run than the one in which it is left. ``places``: the slot that each page has at first.
    """
    at, found = dict(places), list[list[tuple[int, int]]]()
    left: dict[int, int] = {}  # by slot: after which run it is free
    moved: dict[int, int] = {}  # by page: after which run it is there
    for page, slot in moves:
        run = max(left.get(slot, 0), moved.get(page, 0))
        if run == len(found):
            found.append([])
        found[run].append((page, slot))
        left[at[page]] = moved[page] = run + 1
        at[page] = slot
    return found


def ordered_moves(arena: Arena, slot_class: SlotClass, owners: Mapping[int, int]) -> list[tuple[int, int]]:
    """Moves (page, to slot) after which the pages of ``owners`` (by slot, those that may move) lie in order in as few
    segments as hold all slots that are taken.
    """
    fixed = set(arena.taken_slots(slot_class)) - owners.keys()
    targets = [slot for slot in arena.slots_kept(slot_class, fixed) if slot not in fixed]
    pages = in_order(owners.values())
    wanted = dict(zip(pages, targets, strict=False))
    places = {page: slot for slot, page in owners.items()}
    if wanted == places:
        return []
    return moves_in_order(places, wanted, spare=arena.spare_slot(slot_class, set(wanted.values())))


def compact(pager: Pager, slot_class: SlotClass, *, tight: bool = False) -> int:
    """Moves pages of a class of the device arena together; the bytes that went back to the system.

    ``tight``: whatever the limit, and in order, see [Note: compaction].
    """
    device, table = pager.tiers.device, pager.table
    pager.tiers.copier.settle()
    ids = np.nonzero((table.tier == DEVICE) & (table.class_index == table.index_of(slot_class)))[0]
    owners = dict(zip(table.slot[ids].tolist(), ids.tolist(), strict=True))
    still = {slot for slot, page_id in owners.items() if table.pins[page_id] or page_id in pager.flights}
    still |= {flight.slot for flight in pager.flights.values() if flight.target is TierKind.DEVICE}
    if tight:
        movable = {slot: page_id for slot, page_id in owners.items() if slot not in still}
        moves: Sequence[tuple[int, int]] = ordered_moves(device, slot_class, movable)
    else:
        moves = [(owners[source], target) for source, target in device.moves_to_compact(slot_class, still)]
    places = {page_id: slot for slot, page_id in owners.items()}
    for run in together(moves, places):
        pager.relocate(run)
    return device.trim(slot_class, tight=tight)

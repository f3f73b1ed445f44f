"""Pages that may leave, kept in the order in which they would go.

[Note: kept order]
``choose_victims`` (``residency.py``) says who leaves: it puts all candidates in order and takes the first. To do so
whenever a page is needed costs more than all the rest of deciding, and little changes between two needs. So the order
is kept: candidates are sorted when next uses were computed anew (as a visit begins), and a page that has changed since
(given back, arrived, passed by the visit) stands in a heap beside the sorted ones, with what is true of it now. What is
written in either about a page that has changed again, or may not leave at present, is passed over. Whatever happens to
a page has to be told (``Victims.changed``) by the time it may leave again; that costs no more than a list's ``append``
until somebody asks. The pages chosen are those of the pure function over a snapshot; where its allowance could leave
one of them out, it is asked itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container

import numpy as np

from megascale_omni.paging.forecast import FAR
from megascale_omni.paging.layout import SlotClass
from megascale_omni.paging.outlook import Outlook
from megascale_omni.paging.residency import Candidates, choose_victims, order_of_going
from megascale_omni.paging.shadow import Shadows
from megascale_omni.paging.table import PageTable
from megascale_omni.paging.tiers import DEVICE

_Key = tuple[float, bool, int, int]
"""(minus its next use, dirty, last use, page id): ascending is the order of going."""

MOST_CHANGES = 1 << 14
"""Changes that nobody asked after; from there on sorting anew is cheaper."""


class _Order:
    """The candidates of one slot class. See [Note: kept order]."""

    def __init__(self, keys: list[_Key]) -> None:
        self._sorted = keys
        self._place = 0  # of the first that has not been passed over
        self._heap: list[_Key] = []
        self._newest: dict[int, _Key] = {}  # the newest entry in the heap, by page

    def push(self, key: _Key) -> None:
        """A page has changed; this is what is true of it now."""
        self._newest[key[3]] = key
        heapq.heappush(self._heap, key)

    def take(self, count: int, *, before: float, may_leave: Callable[[int], bool]) -> list[int]:
        """The first ``count`` that may leave and are needed after ``before``, in order; they are gone from here.

        What stands before them is passed over for good.
        """
        keys, heap, newest = self._sorted, self._heap, self._newest
        place, end = self._place, len(self._sorted)
        found: list[int] = []
        while len(found) < count:
            while place < end and (keys[place][3] in newest or not may_leave(keys[place][3])):
                place += 1
            while heap and (newest[heap[0][3]] is not heap[0] or not may_leave(heap[0][3])):
                heapq.heappop(heap)
            of_heap = bool(heap) and (place == end or heap[0] < keys[place])
            if not of_heap and place == end:
                break
            key = heap[0] if of_heap else keys[place]
            if -key[0] <= before:
                break
            found.append(key[3])
            if of_heap:
                heapq.heappop(heap)
            else:
                place += 1
        self._place = place
        return found


class Victims:
    """Chooses who leaves the device arena. ``flying``: pages on their way; ``keep``: those being brought together.

    ``changed``: pages that were given back or have arrived, or are free to leave again, are added to it.
    """

    def __init__(
        self,
        table: PageTable,
        outlook: Outlook,
        shadows: Shadows,
        *,
        flying: Container[int],
        keep: Callable[[], frozenset[int]],
    ) -> None:
        self._table, self._outlook, self._shadows = table, outlook, shadows
        self._flying, self._keep = flying, keep
        self._orders: dict[SlotClass, _Order] = {}
        self.changed: list[int] = []
        self._epoch = -1
        self._passed = 0

    def forget(self) -> None:
        """Nobody has asked for long: candidates are put in order anew when somebody does."""
        self.changed.clear()
        self._orders.clear()

    def choose(self, slot_class: SlotClass, *, count: int, before: float) -> list[int]:
        """Up to ``count`` pages of a class to evict, first to go first: those of ``choose_victims``.

        One that does not begin to leave after all has to be added to ``changed``.
        """
        order = self._order(slot_class)
        found = order.take(count, before=before, may_leave=self._may_leave)
        shadow = self._shadows.of(slot_class)
        if shadow.count_held(found) > shadow.allowance:
            self.changed += found
            return choose_victims(self.snapshot(slot_class), count=count, needed_before=before)
        return found

    def _may_leave(self, page_id: int) -> bool:
        table = self._table
        if table.tier_at[page_id] != DEVICE or table.pins_at[page_id]:
            return False
        return page_id not in self._flying and page_id not in self._keep()

    def snapshot(self, slot_class: SlotClass) -> Candidates:
        """All pages of a class that may leave, as they are now."""
        keep, shadow = self._keep(), self._shadows.of(slot_class)
        here = [p for p in self._free(slot_class).tolist() if p not in self._flying and p not in keep]
        ids = np.array(here, dtype=np.int64)
        return Candidates(
            ids,
            self._outlook.next_use(ids),
            self._table.dirty[ids],
            self._table.last_use[ids],
            shadowed=shadow.holds(ids),
            allowance=shadow.allowance,
        )

    def _free(self, slot_class: SlotClass) -> np.ndarray:
        """Pages of a class that are here and that no lease holds."""
        table = self._table
        mask = (table.tier == DEVICE) & (table.pins == 0) & (table.class_index == table.index_of(slot_class))
        found: np.ndarray = mask.nonzero()[0]
        return found

    def _order(self, slot_class: SlotClass) -> _Order:
        """The order of a class, up to date."""
        outlook = self._outlook
        outlook.update()
        if self._epoch != outlook.epoch:
            self._epoch, self._passed = outlook.epoch, outlook.num_passed
            self._orders.clear()
            self.changed.clear()
        elif self._orders:
            self._take_in()
        order = self._orders.get(slot_class)
        if order is None:
            ids, table = self._free(slot_class), self._table  # those on their way are told of when they are not
            uses, dirty, last_use = outlook.next_use(ids), table.dirty[ids], table.last_use[ids]
            going = order_of_going(uses, dirty, last_use)
            dirty &= uses < FAR  # as order_of_going has it
            columns = (-uses[going], dirty[going], last_use[going], ids[going])
            order = self._orders[slot_class] = _Order(list(zip(*(c.tolist() for c in columns), strict=True)))
        return order

    def _take_in(self) -> None:
        """Tells the orders what has changed."""
        outlook, table, changed = self._outlook, self._table, self.changed
        passed = outlook.num_passed
        if passed != self._passed:
            changed += outlook.passed_since(self._passed)
            self._passed = passed
        if not changed:
            return
        orders, class_at = self._orders, table.class_at
        only = next(iter(orders.values())) if len(table.classes) == 1 else None
        tier, pins, dirty, last_use, uses = (
            table.tier_at,
            table.pins_at,
            table.dirty_at,
            table.last_use_at,
            outlook.use_at,
        )
        for page_id in dict.fromkeys(changed):
            if tier[page_id] == DEVICE and not pins[page_id]:
                order = only or orders.get(table.classes[class_at[page_id]])
                if order is not None:
                    use = uses[page_id]
                    written = use < FAR and bool(dirty[page_id])  # as order_of_going has it
                    order.push((-use, written, last_use[page_id], page_id))
        changed.clear()

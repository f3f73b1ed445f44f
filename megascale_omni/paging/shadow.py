"""What LRU would have done in our place: a count of its page-ins beside ours, and a bound on what ours may cost.

[Note: never worse than LRU]
Beside the arena runs a shadow: the pages that an arena of the same size would hold if the page used longest ago left
whenever room is needed, and nothing were fetched ahead. *Credit* is how many page-ins LRU has had more than we. A page
that the shadow holds and we do not is *missing*: it may cost us a page-in that LRU does not have, once. As long as

    missing <= credit + slack

we never come to more page-ins than LRU and ``slack``, over the whole run, whatever is used next: a use of a missing
page takes one off both sides, any other use takes nothing off the credit. Three things may break the inequality, and
each is asked for beforehand: to let a page leave that the shadow holds, to fetch a page ahead that it does not hold,
and both at once. Where there is no allowance left, a page leaves that the shadow does not hold either (there is one:
the arena is full, and the shadow is no larger and holds the page that is wanted), and that is LRU again until the
credit has grown. ``slack`` is a part of one filling of the arena, so that there is something to begin with.
What is sent away on purpose (frozen experts) LRU is taken to send away as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from megascale_omni.paging.layout import SlotClass


def slack_of(slots: int) -> int:
    """Page-ins that a run may have more than LRU in an arena of ``slots`` slots, in all."""
    return max(LEAST_SLACK, slots // SLACK_PART)


SLACK_PART = 4
LEAST_SLACK = 8
"""As many pages as are always fetched ahead."""


class ShadowLru:
    """The shadow of one slot class. ``slots`` tells how many the arena has. See [Note: never worse than LRU]."""

    def __init__(self, slots: Callable[[], int]) -> None:
        self._slots = slots
        self.page_ins = 0
        self._credit = 0
        self._order: OrderedDict[int, None] = OrderedDict()  # used longest ago first
        self._held = np.zeros(0, dtype=bool)  # by page id: whether it is in _order
        self._missing: set[int] = set()

    @property
    def allowance(self) -> int:
        """How many more page-ins than LRU's may still be risked."""
        return slack_of(self._slots()) + self._credit - len(self._missing)

    def may_load(self, page_id: int) -> bool:
        """Whether a page may be fetched before it is wanted."""
        return page_id in self._order or self.allowance >= 1

    def holds(self, page_ids: np.ndarray) -> np.ndarray:
        """Mask: which pages LRU would have in the arena."""
        try:
            found: np.ndarray = self._held[page_ids]
        except IndexError:  # of pages that were never here
            self._grow(int(page_ids.max()))
            found = self._held[page_ids]
        return found

    def count_held(self, page_ids: Sequence[int]) -> int:
        """How many of these pages LRU would have in the arena."""
        return sum(page_id in self._order for page_id in page_ids)

    def _grow(self, page_id: int) -> None:
        """Room for page ids up to this one."""
        more = np.zeros(max(page_id + 1, 2 * len(self._held)) - len(self._held), dtype=bool)
        self._held = np.concatenate([self._held, more])

    def _enter(self, page_id: int) -> None:
        self._order[page_id] = None
        if page_id >= len(self._held):
            self._grow(page_id)
        self._held[page_id] = True

    # -- what happens --------------------------------------------------------------------------------------------------

    def use(self, page_ids: Sequence[int], *, here: Callable[[int], bool], pinned: Callable[[int], bool]) -> None:
        """Pages are used together, once. ``here``: whether we have a page; ``pinned``: whether a lease holds it."""
        order, absent = self._order, []
        for page_id in page_ids:
            if page_id in order:
                order.move_to_end(page_id)
            else:
                absent.append(page_id)
        if not absent:
            return
        self.page_ins += len(absent)
        self._credit += len(absent)
        for page_id in absent:
            self._enter(page_id)
            if not here(page_id):
                self._missing.add(page_id)
        self._shrink(pinned, page_ids)

    def create(self, page_id: int, *, pinned: Callable[[int], bool]) -> None:
        """A page came into being, in the arena."""
        self._enter(page_id)
        self._shrink(pinned, (page_id,))

    def drop(self, page_id: int) -> None:
        """A page ceased to be."""
        if page_id in self._order:
            del self._order[page_id]
            self._held[page_id] = False
        self._missing.discard(page_id)

    def load_ahead(self, page_id: int) -> bool:
        """Both at once: whether a page may be fetched before it is wanted; if so, it is, as :meth:`loaded` has it."""
        if not self.may_load(page_id):
            return False
        self.loaded(page_id)
        return True

    def loaded(self, page_id: int) -> None:
        """We bring a page in. To be told before room is made for it, which must not spend the same allowance."""
        self._credit -= 1
        self._missing.discard(page_id)

    def not_loaded(self, page_id: int) -> None:
        """There was no room after all."""
        self._credit += 1
        self.leave((page_id,))

    def leave(self, page_ids: Iterable[int]) -> None:
        """We let pages leave."""
        order = self._order
        self._missing.update([page_id for page_id in page_ids if page_id in order])

    def stayed(self, page_id: int) -> None:
        """A page that was to leave stays."""
        self._missing.discard(page_id)

    def restart(self, here: Iterable[int]) -> None:
        """The arena has another size: LRU begins anew with what is there (used longest ago first); credit is kept."""
        self._order = OrderedDict()
        self._held[:] = False
        for page_id in here:
            self._enter(page_id)
        self._missing.clear()
        self._credit = max(0, self._credit)

    def _shrink(self, pinned: Callable[[int], bool], keep: Sequence[int]) -> None:
        """Lets the pages used longest ago leave until the rest fits; those that leases hold stay."""
        order = self._order
        excess = len(order) - self._slots()
        if excess <= 0:
            return
        leaving = []
        for page_id in order:
            if pinned(page_id) or page_id in keep:
                continue
            leaving.append(page_id)
            if len(leaving) == excess:
                break
        for page_id in leaving:
            del order[page_id]
            self._held[page_id] = False
        self._missing.difference_update(leaving)


class Shadows:
    """The shadows of all slot classes. ``class_of`` tells a page's; ``slots_of``, what tells a class's slots."""

    def __init__(
        self, class_of: Callable[[int], SlotClass], slots_of: Callable[[SlotClass], Callable[[], int]]
    ) -> None:
        self._class_of, self._slots_of = class_of, slots_of
        self._of: dict[SlotClass, ShadowLru] = {}
        self._of_page: dict[int, ShadowLru] = {}  # looked up thousands of times a step

    def of(self, slot_class: SlotClass) -> ShadowLru:
        """The shadow of a class."""
        if slot_class not in self._of:
            self._of[slot_class] = ShadowLru(self._slots_of(slot_class))
        return self._of[slot_class]

    def of_page(self, page_id: int) -> ShadowLru:
        """The shadow of a page's class, which may be another one once the page was dropped."""
        found = self._of_page.get(page_id)
        if found is None:
            found = self._of_page[page_id] = self.of(self._class_of(page_id))
        return found

    def drop(self, page_id: int) -> None:
        """A page ceased to be."""
        self.of_page(page_id).drop(page_id)
        del self._of_page[page_id]

    def use(self, page_ids: np.ndarray, *, here: Callable[[int], bool], pinned: Callable[[int], bool]) -> None:
        """See :meth:`ShadowLru.use`, for pages of any classes."""
        pages = page_ids.tolist()
        if len(self._of) == 1:  # pages that were never created are not used
            for shadow in self._of.values():
                shadow.use(pages, here=here, pinned=pinned)
            return
        shadows = [self.of_page(page_id) for page_id in pages]
        if shadows and shadows.count(shadows[0]) == len(shadows):
            shadows[0].use(pages, here=here, pinned=pinned)
            return
        for shadow in dict.fromkeys(shadows):
            shadow.use([p for p, s in zip(pages, shadows, strict=True) if s is shadow], here=here, pinned=pinned)

    def page_in_bytes(self) -> int:
        """Bytes of the page-ins that LRU would have had."""
        return sum(shadow.page_ins * slot_class.nbytes for slot_class, shadow in self._of.items())

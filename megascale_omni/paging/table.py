"""The page table: one row a page id, one numpy column a property."""

from __future__ import annotations

import enum

import numpy as np

from megascale_omni.paging.layout import SlotClass
from megascale_omni.paging.planes import PageNumbering
from megascale_omni.paging.readers import Readers
from megascale_omni.paging.tiers import ABSENT, DEVICE, TierKind


class PageState(enum.Enum):
    """What a page's row says about its bytes."""

    ABSENT = "absent"  # no bytes anywhere; a gradient page before its expert's first token
    ACTIVE = "active"  # in the device arena; can be leased
    COLD = "cold"  # in host memory
    EVICTED = "evicted"  # on disk


_STATES = {
    TierKind.ABSENT: PageState.ABSENT,
    TierKind.DEVICE: PageState.ACTIVE,
    TierKind.HOST: PageState.COLD,
    TierKind.DISK: PageState.EVICTED,
}


class PageTable:
    """Rows of all pages. The manager and its pager alone write it.

    Columns: ``tier`` (TierKind), ``slot`` (in that tier's arena; -1 elsewhere), ``dirty`` (the disk does not hold the
    current bytes), ``pins`` (leases that hold the page), ``last_step`` (last optimizer step applied, kept in the weight
    plane's row), ``last_use`` (a counter), ``class_index`` (slot class, -1 unknown), ``disk_offset`` (its place in the
    disk file, -1 none), ``changed`` (since the last checkpoint that was saved or loaded; ``changed_since``: by whom).
    ``readers``: other threads that want pages to stay. ``held``: ids of the pages with pins.

    ``tier_at``, ``pins_at``, ``dirty_at``, ``last_use_at``, ``class_at`` and ``slot_at`` show the same columns value by
    value, as plain Python numbers: reading one takes a fraction of what reading one of an array does, and deciding
    about single pages reads thousands a step.
    """

    def __init__(self, numbering: PageNumbering) -> None:
        self.numbering = numbering
        self.classes: list[SlotClass] = []
        self._index: dict[SlotClass, int] = {}
        self.tier = np.zeros(0, dtype=np.int8)
        self.slot = np.zeros(0, dtype=np.int32)
        self.dirty = np.zeros(0, dtype=np.bool_)
        self.pins = np.zeros(0, dtype=np.int16)
        self.last_step = np.zeros(0, dtype=np.int32)
        self.last_use = np.zeros(0, dtype=np.int64)
        self.class_index = np.zeros(0, dtype=np.int16)
        self.disk_offset = np.zeros(0, dtype=np.int64)
        self.changed = np.zeros(0, dtype=np.bool_)
        self.changed_since: object = None
        self.readers = Readers()
        self.held: set[int] = set()
        self._show()

    def _show(self) -> None:
        self.tier_at, self.pins_at, self.dirty_at = self.tier.data, self.pins.data, self.dirty.data
        self.last_use_at, self.class_at, self.slot_at = self.last_use.data, self.class_index.data, self.slot.data

    def grow(self) -> None:
        """Adds rows for the pages of modules that registered since; new pages are absent."""
        more = self.numbering.num_pages - len(self.tier)
        fill = {"tier": ABSENT, "slot": -1, "class_index": -1, "disk_offset": -1, "changed": True}
        names = ("tier", "slot", "dirty", "pins", "last_step", "last_use", "class_index", "disk_offset", "changed")
        for name in names:
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.full(more, fill.get(name, 0), dtype=column.dtype)]))
        self._show()

    def index_of(self, slot_class: SlotClass) -> int:
        """The number of a slot class; a new one gets the next."""
        index = self._index.get(slot_class)
        if index is None:
            index = self._index[slot_class] = len(self.classes)
            self.classes.append(slot_class)
        return index

    def slot_class(self, page_id: int) -> SlotClass:
        """The slot class of a page. RuntimeError where its module has no such plane."""
        index = self.class_at[page_id]
        if index < 0:
            raise RuntimeError(f"there is no {self.numbering.describe(page_id)}: its module does not have this plane")
        return self.classes[index]

    def state(self, page_id: int) -> PageState:
        """The state of one page."""
        return _STATES[TierKind(self.tier[page_id])]

    def place(self, page_id: int, *, tier: TierKind, slot: int) -> None:
        """Records that an absent page now has bytes in ``slot`` of ``tier``."""
        if self.tier_at[page_id] != ABSENT:
            raise RuntimeError(f"{self.numbering.describe(page_id)} is placed twice")
        self.tier[page_id] = int(tier)
        self.slot[page_id] = slot

    def move(self, page_id: int, *, tier: TierKind, slot: int) -> None:
        """Records that an unpinned page's bytes are in another tier now."""
        if self.tier_at[page_id] == ABSENT or self.pins_at[page_id]:
            raise RuntimeError(
                f"{self.numbering.describe(page_id)} moves while it is {self.state(page_id).value} with "
                f"{self.pins[page_id]} leases"
            )
        with self.readers.moving(page_id):
            self.tier[page_id] = int(tier)
            self.slot[page_id] = slot

    def shift(self, page_id: int, slot: int) -> None:
        """Records that a page's bytes are in another slot of the same tier now."""
        with self.readers.moving(page_id):
            self.slot[page_id] = slot

    def remove(self, page_id: int) -> int:
        """Makes an unpinned page absent and returns the slot it had."""
        if self.tier[page_id] == ABSENT:
            raise RuntimeError(f"{self.numbering.describe(page_id)} is removed but absent")
        if self.pins[page_id]:
            raise RuntimeError(
                f"{self.numbering.describe(page_id)} is removed while {self.pins[page_id]} leases hold it"
            )
        slot = int(self.slot[page_id])
        with self.readers.moving(page_id):
            self.tier[page_id] = ABSENT
            self.slot[page_id] = -1
        self.dirty[page_id] = False
        return slot

    def is_pinned(self, page_id: int) -> bool:
        """Whether a lease holds a page."""
        return page_id in self.held

    def check_present(self, page_ids: np.ndarray) -> None:
        """Raises RuntimeError where one of the pages to be leased is absent."""
        absent = page_ids[self.tier[page_ids] == ABSENT]
        if len(absent):
            raise RuntimeError(f"{self.numbering.describe(int(absent[0]))} is leased but absent")

    def pin(self, page_ids: np.ndarray) -> None:
        """Adds a pin to each page; every page must be ACTIVE."""
        if (self.tier[page_ids] != DEVICE).any():
            missing = int(page_ids[self.tier[page_ids] != DEVICE][0])
            raise RuntimeError(f"{self.numbering.describe(missing)} is leased but {self.state(missing).value}")
        self.pins[page_ids] += 1
        self.held.update(page_ids.tolist())

    def unpin(self, page_ids: np.ndarray) -> None:
        """Takes a pin from each page."""
        if (self.pins[page_ids] <= 0).any():
            raise RuntimeError("a page is released that no lease holds")
        self.pins[page_ids] -= 1
        pins = self.pins_at
        self.held.difference_update([page_id for page_id in page_ids.tolist() if not pins[page_id]])

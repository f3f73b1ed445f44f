"""The page table: one row a page id, one numpy column a property."""

from __future__ import annotations

import enum

import numpy as np

from megascale_omni.paging.planes import PageNumbering
from megascale_omni.paging.tiers import TierKind


class PageState(enum.Enum):
    """What a page's row says about its bytes."""

    ABSENT = "absent"  # no bytes anywhere; a gradient page before its expert's first token
    ACTIVE = "active"  # in the device arena; can be leased


class PageTable:
    """Rows of all pages. The manager and its leases alone place, remove and pin pages.

    Columns: ``tier`` (TierKind), ``slot`` (-1 where absent), ``dirty`` (differs from every slower copy), ``pins``
    (leases that hold the page), ``last_step`` (number of the last optimizer step applied; kept in the weight plane's
    row, by the optimizer). Whoever writes to a page says so in ``dirty``.
    """

    def __init__(self, numbering: PageNumbering) -> None:
        self.numbering = numbering
        self.tier = np.zeros(0, dtype=np.int8)
        self.slot = np.zeros(0, dtype=np.int32)
        self.dirty = np.zeros(0, dtype=np.bool_)
        self.pins = np.zeros(0, dtype=np.int16)
        self.last_step = np.zeros(0, dtype=np.int32)

    def grow(self) -> None:
        """Adds rows for the pages of modules that registered since; new pages are absent."""
        more = self.numbering.num_pages - len(self.tier)
        self.tier = np.concatenate([self.tier, np.full(more, TierKind.ABSENT, dtype=np.int8)])
        self.slot = np.concatenate([self.slot, np.full(more, -1, dtype=np.int32)])
        self.dirty = np.concatenate([self.dirty, np.zeros(more, dtype=np.bool_)])
        self.pins = np.concatenate([self.pins, np.zeros(more, dtype=np.int16)])
        self.last_step = np.concatenate([self.last_step, np.zeros(more, dtype=np.int32)])

    def state(self, page_id: int) -> PageState:
        """The state of one page."""
        return PageState.ABSENT if self.tier[page_id] == TierKind.ABSENT else PageState.ACTIVE

    def place(self, page_id: int, *, tier: TierKind, slot: int) -> None:
        """Records that an absent page now has bytes in ``slot`` of ``tier``."""
        if self.tier[page_id] != TierKind.ABSENT:
            raise RuntimeError(f"{self.numbering.describe(page_id)} is placed twice")
        self.tier[page_id] = tier
        self.slot[page_id] = slot

    def remove(self, page_id: int) -> int:
        """Makes an unpinned page absent and returns the slot it had."""
        if self.tier[page_id] == TierKind.ABSENT:
            raise RuntimeError(f"{self.numbering.describe(page_id)} is removed but absent")
        if self.pins[page_id]:
            raise RuntimeError(
                f"{self.numbering.describe(page_id)} is removed while {self.pins[page_id]} leases hold it"
            )
        slot = int(self.slot[page_id])
        self.tier[page_id] = TierKind.ABSENT
        self.slot[page_id] = -1
        self.dirty[page_id] = False
        return slot

    def pin(self, page_ids: np.ndarray) -> None:
        """Adds a pin to each page; every page must be ACTIVE."""
        if (self.tier[page_ids] != TierKind.DEVICE).any():
            missing = int(page_ids[self.tier[page_ids] != TierKind.DEVICE][0])
            raise RuntimeError(f"{self.numbering.describe(missing)} is leased but {self.state(missing).value}")
        self.pins[page_ids] += 1

    def unpin(self, page_ids: np.ndarray) -> None:
        """Takes a pin from each page."""
        if (self.pins[page_ids] <= 0).any():
            raise RuntimeError("a page is released that no lease holds")
        self.pins[page_ids] -= 1

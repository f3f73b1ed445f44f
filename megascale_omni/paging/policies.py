"""Policies that a trace is replayed under: LRU, and the one of a run."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megascale_omni.paging.forecast import Visit
from megascale_omni.paging.outlook import Outlook
from megascale_omni.paging.residency import Candidates, choose_victims
from megascale_omni.paging.shadow import ShadowLru
from megascale_omni.paging.trace import TracedModel


class Policy(Protocol):
    """Who leaves, and who is fetched early."""

    prefetches: bool

    def begin(self, visit: Visit, pages: np.ndarray) -> None:
        """A visit begins."""
        ...

    def step(self) -> None:
        """A training step begins."""
        ...

    def reach(self, page: int) -> None:
        """The visit has come to this page."""
        ...

    def use(self, page_ids: Sequence[int]) -> None:
        """Pages are used now (resident, or about to be)."""
        ...

    def victims(self, pages: np.ndarray, *, count: int, before: float, shadow: ShadowLru) -> list[int]:
        """Up to ``count`` of ``pages`` (unpinned, of one class) that leave; none that is needed before ``before``."""
        ...


class Lru:
    """The page used longest ago leaves."""

    prefetches = False

    def __init__(self) -> None:
        self._used: dict[int, int] = {}
        self._clock = 0

    def begin(self, visit: Visit, pages: np.ndarray) -> None:
        """See Policy."""

    def step(self) -> None:
        """See Policy."""

    def reach(self, page: int) -> None:
        """See Policy."""

    def use(self, page_ids: Sequence[int]) -> None:
        """See Policy."""
        for page_id in page_ids:
            self._clock += 1
            self._used[page_id] = self._clock

    def victims(self, pages: np.ndarray, *, count: int, before: float, shadow: ShadowLru) -> list[int]:
        """See Policy."""
        return heapq.nsmallest(count, pages.tolist(), key=lambda p: self._used.get(p, 0))


class Ours:
    """The policy of a run."""

    def __init__(self, model: TracedModel, dirty: np.ndarray, *, prefetch: bool = True) -> None:
        numbering = model.numbering()
        self.prefetches = prefetch
        self.outlook = Outlook(numbering)
        self._dirty = dirty
        self._last_use = np.zeros(numbering.num_pages, dtype=np.int64)
        self._clock = 0

    def begin(self, visit: Visit, pages: np.ndarray) -> None:
        """See Policy."""
        self.outlook.begin(visit, pages)

    def step(self) -> None:
        """See Policy."""
        self.outlook.end_step()

    def reach(self, page: int) -> None:
        """See Policy."""
        self.outlook.reached(page)

    def use(self, page_ids: Sequence[int]) -> None:
        """See Policy."""
        self._clock += 1
        self._last_use[page_ids] = self._clock

    def victims(self, pages: np.ndarray, *, count: int, before: float, shadow: ShadowLru) -> list[int]:
        """See Policy."""
        candidates = Candidates(
            pages,
            self.outlook.next_use(pages),
            self._dirty[pages],
            self._last_use[pages],
            shadowed=shadow.holds(pages),
            allowance=shadow.allowance,
        )
        return choose_victims(candidates, count=count, needed_before=before)

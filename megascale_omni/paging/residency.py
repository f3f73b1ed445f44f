"""Who leaves when room is needed: pure functions over a frozen snapshot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Candidates:
    """Pages of one slot class that may leave: in the arena, not pinned, not on their way.

    Columns of equal length: ``page_ids``; ``next_use`` as the forecast tells; ``dirty``; ``last_use`` (a counter).
    """

    page_ids: np.ndarray
    next_use: np.ndarray
    dirty: np.ndarray
    last_use: np.ndarray


def choose_victims(candidates: Candidates, *, count: int, needed_before: float = -np.inf) -> list[int]:
    """Up to ``count`` pages to evict, first to go first.

    The page whose next use is farthest away goes first (Belady's MIN). Among equals a clean page goes before a dirty
    one, which would have to be written, then the one used longest ago. Pages needed before ``needed_before`` stay.
    """
    order = np.lexsort((candidates.last_use, candidates.dirty, -candidates.next_use))
    order = order[candidates.next_use[order] > needed_before]
    victims: list[int] = candidates.page_ids[order[:count]].tolist()
    return victims

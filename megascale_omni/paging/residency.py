"""Who leaves when room is needed: pure functions over a frozen snapshot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megascale_omni.paging.forecast import FAR


@dataclass(frozen=True)
class Candidates:
    """Pages of one slot class that may leave: in the arena, not pinned, not on their way.

    Columns of equal length: ``page_ids``; ``next_use`` as the forecast tells; ``dirty``; ``last_use`` (a counter);
    ``shadowed``: LRU would have the page here. At most ``allowance`` of these may leave [Note: never worse than LRU].
    """

    page_ids: np.ndarray
    next_use: np.ndarray
    dirty: np.ndarray
    last_use: np.ndarray
    shadowed: np.ndarray
    allowance: int


def choose_victims(candidates: Candidates, *, count: int, needed_before: float = -np.inf) -> list[int]:
    """Up to ``count`` pages to evict, first to go first.

    The page whose next use is farthest away goes first (Belady's MIN). Among equals a clean page goes before a dirty
    one, which would have to be written, then the one used longest ago; where no use is known the latter goes first, as
    LRU would have it. Pages needed before ``needed_before`` stay.
    Where room is needed whatever it costs and the allowance leaves nobody, the page used longest ago goes.
    """
    if count <= 0:
        return []
    use = candidates.next_use
    if len(use) > count <= candidates.allowance:  # the few that are needed last are enough to be put in order
        farthest = np.partition(use, len(use) - count)[len(use) - count]
        rows = (use >= farthest if farthest > needed_before else use > needed_before).nonzero()[0]
    else:
        rows = (use > needed_before).nonzero()[0]
    if not len(rows):
        return []
    order = rows[order_of_going(use[rows], candidates.dirty[rows], candidates.last_use[rows])]
    shadowed = candidates.shadowed[order]
    allowed = order[:count]
    if np.count_nonzero(shadowed) > candidates.allowance:
        allowed = order[~shadowed | (np.cumsum(shadowed) <= candidates.allowance)][:count]
    if not len(allowed) and needed_before == -np.inf:
        allowed = order[np.argsort(candidates.last_use[order], kind="stable")][:1]
    victims: list[int] = candidates.page_ids[allowed].tolist()
    return victims


def order_of_going(next_use: np.ndarray, dirty: np.ndarray, last_use: np.ndarray) -> np.ndarray:
    """Places of pages, first to go first; see :func:`choose_victims`."""
    order: np.ndarray = np.lexsort((last_use, dirty & (next_use < FAR), -next_use))
    return order


VICTIMS_AT_ONCE = 4
"""Enough to keep io threads busy; each more of them costs page-ins (8 were up to 4 % over one, 4 are up to 2 %)."""


def victims_at_once(slots: int) -> int:
    """How many pages begin to leave together in an arena of ``slots`` slots (of a class) when room is needed.

    Dirty ones take time to be written; as soon as a clean one has gone, there is room and no more need go.
    """
    return 1 + min(VICTIMS_AT_ONCE, slots // 8)


PROBABLE = 0.9
"""Experts that a visit needs with at least this probability are fetched before it begins."""

ALWAYS_AHEAD = 8
"""Pages that are fetched ahead even where it costs a page-in more, so that the disk has something to do meanwhile."""


def pages_ahead(slots: int, *, always: int = ALWAYS_AHEAD) -> int:
    """How many pages to ask for ahead in an arena of ``slots`` slots (of the smallest class)."""
    return always + slots // 16


def displaced_before(number: int, needed: float, held_until: float, *, always: int = ALWAYS_AHEAD) -> float:
    """What a page ahead may displace: pages whose next use is later than the time returned.

    ``number`` counts the pages asked for from 0, ``needed`` is when this one is used, ``held_until`` the latest next
    use of the pages that leases hold now and will give back (minus infinity: none). A page that comes early displaces
    another before its time. It costs nothing where that one would leave anyway, which is not so as long as a page that
    is held now is needed later still: that one would leave instead, a moment later. The first ``always`` pages are
    fetched all the same.
    """
    return needed if number < always else max(needed, held_until)


def probable_experts(probability: np.ndarray) -> np.ndarray:
    """Experts worth fetching before their visit, ascending."""
    found: np.ndarray = np.nonzero(probability >= PROBABLE)[0]
    return found

"""Who leaves: a table of what is there and who must go."""

from dataclasses import dataclass

import numpy as np
import pytest

from megascale_omni.paging.forecast import FAR
from megascale_omni.paging.residency import Candidates, choose_victims

INF = float("inf")


@dataclass(frozen=True)
class Row:
    """Pages as (id, next use, dirty, last use); how many must go; what is needed before that stays; pages that LRU
    would have, and how many of them may go.
    """

    why: str
    pages: tuple[tuple[int, float, bool, int], ...]
    victims: tuple[int, ...]
    count: int = 1
    before: float = -INF
    shadowed: tuple[int, ...] = ()
    allowance: int = 0


ROWS = [
    Row("the farthest next use goes first", ((1, 5.0, False, 0), (2, 9.0, False, 0), (3, 7.0, False, 0)), (2,)),
    Row("also where it is dirty", ((1, 5.0, False, 0), (2, 9.0, True, 0)), (2,)),
    Row("among equals a clean page", ((1, 9.0, True, 0), (2, 9.0, False, 5)), (2,)),
    Row("among equals used longest ago", ((1, 9.0, True, 8), (2, 9.0, True, 5), (3, 9.0, True, 7)), (2,)),
    Row("in that order", ((1, 1.0, False, 0), (2, 9.0, True, 1), (3, 9.0, False, 9)), (3, 2, 1), count=3),
    Row("no more than there are", ((1, 1.0, False, 0),), (1,), count=5),
    Row("none where none is asked for", ((1, 1.0, False, 0),), (), count=0),
    Row("none of none", (), (), count=3),
    Row("what is needed sooner stays", ((1, 3.0, False, 0), (2, 5.0, False, 0)), (2,), count=2, before=3.5),
    Row("what is needed at the same time stays too", ((1, 3.5, False, 0),), (), before=3.5),
    Row("whatever is needed sooner, if a page is waited for", ((1, 0.0, True, 9),), (1,)),
    Row("never used again goes first", ((1, 8.0, False, 0), (2, float(1 << 40), True, 9)), (2,)),
    Row("of uses that nobody knows the one used longest ago", ((1, FAR, True, 3), (2, FAR, False, 5)), (1,)),
    Row("not one that LRU would have", ((1, 5.0, False, 0), (2, 9.0, False, 0)), (1,), shadowed=(2,)),
    Row(
        "but as many of these as are allowed",
        ((1, 1.0, False, 0), (2, 9.0, False, 0), (3, 8.0, False, 0)),
        (2, 1),
        count=3,
        shadowed=(2, 3),
        allowance=1,
    ),
    Row(
        "what LRU would let go, if a page is waited for and nobody may leave",
        ((1, 5.0, False, 3), (2, 9.0, False, 4)),
        (1,),
        shadowed=(1, 2),
    ),
    Row("nobody, if none is waited for", ((1, 5.0, False, 3),), (), shadowed=(1,), before=2.0),
    Row("an overdrawn allowance is none", ((1, 5.0, False, 3),), (), shadowed=(1,), before=2.0, allowance=-3),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.why)
def test_victims(row: Row):
    columns = [np.array(column) for column in zip(*row.pages, strict=True)] if row.pages else [np.array([])] * 4
    ids, next_use, dirty, last_use = columns
    candidates = Candidates(
        ids.astype(int),
        next_use.astype(float),
        dirty.astype(bool),
        last_use.astype(int),
        shadowed=np.isin(ids, row.shadowed),
        allowance=row.allowance,
    )
    assert choose_victims(candidates, count=row.count, needed_before=row.before) == list(row.victims)

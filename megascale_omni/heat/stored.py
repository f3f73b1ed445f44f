"""Heat in checkpoints: what experts did, by their global numbers, and taken up again in any layout.

[Note: stored heat]
Every rank stores, of its own experts of a module, integers: tokens, forwards with a token and uses of a page in each
part of the window and in the part at hand, and the step of the last token; and what followed from them: states, when
experts were frozen, for how many seconds they have been cold. A checkpoint has them of all ranks. Whoever loads it adds
up what the ranks saw of an expert, and where several ranks have that expert now, each takes its share: the sums, by
which ranks decide together [Note: agreed heat], are those of the run that was saved. Uses are counted in whole experts
where the page size has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TOKENS, FORWARDS, USES = 0, 1, 2


@dataclass(frozen=True)
class Counts:
    """A module's experts: ``parts`` [parts, experts, 3] and ``open`` [experts, 3] of tokens, forwards and uses, see
    [Note: stored heat]; ``last`` [experts]: step of the last token. ``slices``: pages an expert.
    """

    parts: np.ndarray
    open: np.ndarray
    last: np.ndarray
    slices: int

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "parts": self.parts.tolist(),
            "open": self.open.tolist(),
            "last": self.last.tolist(),
            "slices": self.slices,
        }

    def share(self, rank: int, size: int) -> Counts:
        """What rank ``rank`` of ``size`` that have these experts takes; all of them together have these counts."""
        return Counts(_share(self.parts, rank, size), _share(self.open, rank, size), self.last, self.slices)


def _share(counts: np.ndarray, rank: int, size: int) -> np.ndarray:
    found: np.ndarray = counts // size + (rank < counts % size)
    return found


def combined(found: Sequence[Mapping[str, Any]], numbers: Sequence[int], *, slices: int) -> Counts:
    """The counts of the experts ``numbers`` (global), added up over what ranks stored.

    ``slices``: pages an expert has now. Experts that nobody stored have had no token.
    """
    row = {number: index for index, number in enumerate(numbers)}
    most = max((len(item["counts"]["parts"]) for item in found), default=0)
    parts = np.zeros((most, len(numbers), 3), dtype=np.int64)
    opened, last = np.zeros((len(numbers), 3), dtype=np.int64), np.zeros(len(numbers), dtype=np.int64)
    for item in found:
        known = [(source, row[number]) for source, number in enumerate(item["experts"]) if number in row]
        if not known:
            continue
        sources, rows = (np.asarray(column) for column in zip(*known, strict=True))
        counts = item["counts"]
        theirs = np.asarray(counts["parts"], dtype=np.int64).reshape(-1, len(item["experts"]), 3)[:, sources]
        now = np.asarray(counts["open"], dtype=np.int64)[sources]
        for values in (theirs, now):
            values[..., USES] = values[..., USES] * slices // max(1, counts["slices"])
        parts[most - len(theirs) :, rows] += theirs
        opened[rows] += now
        last[rows] = np.maximum(last[rows], np.asarray(counts["last"], dtype=np.int64)[sources])
    return Counts(parts, opened, last, slices)


def by_number(found: Sequence[Mapping[str, Any]], key: str) -> dict[int, Any]:
    """A value an expert (global) from what ranks stored in lists beside ``experts``; None is no value."""
    values: dict[int, Any] = {}
    for item in found:
        for number, value in zip(item["experts"], item[key], strict=True):
            if value is not None:
                values.setdefault(number, value)
    return values

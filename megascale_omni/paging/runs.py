"""Copies of slots that lie together, found: a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Bytes of one allocation: which allocation, where they begin in it, how many there are."""

    memory: int
    offset: int
    nbytes: int

    def is_before(self, other: Place) -> bool:
        """Whether another place begins in the same allocation where this one ends."""
        return self.memory == other.memory and self.offset + self.nbytes == other.offset


def neighbours(places: Sequence[Place]) -> list[list[int]]:
    """Places, by number, put together: those of a run lie one behind the other."""
    return runs([(place, place) for place in places])


def runs(pairs: Sequence[tuple[Place, Place]]) -> list[list[int]]:
    """Copies (source, target), by number, put together: of each run both sources and targets lie one behind the other.

    Every number is in one run, and no two runs could be one. Addresses that happen to follow each other in two
    allocations do not count: they may be of two kinds of memory, and may go their own ways. Targets must not overlap.
    """
    found: list[list[int]] = []
    for number in sorted(range(len(pairs)), key=lambda n: pairs[n]):
        source, target = pairs[number]
        if found:
            last_source, last_target = pairs[found[-1][-1]]
            if last_source.is_before(source) and last_target.is_before(target):
                found[-1].append(number)
                continue
        found.append([number])
    return found

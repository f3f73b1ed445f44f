"""The dissemination exchange: who sends what to whom in which round, as pure functions.

In round ``k`` a rank sends what it knows to the rank ``2^k`` further on and hears from the one ``2^k`` behind it; what
it knows doubles, so that ceil(log2 P) rounds reach everyone, with two partners a round and nobody in the middle.
(Hensgen, Finkel, Manber: Two algorithms for barrier synchronization, 1988; Bruck et al.: Efficient algorithms for
all-to-all communications, 1997.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

Discovery = Literal["allgather", "gossip"]


@dataclass(frozen=True)
class GossipRound:
    """One round of a rank: ``count`` vectors (its own and those of the ranks before it) go to ``target``; as many,
    of ``source`` and the ranks before that, come back.
    """

    target: int
    source: int
    count: int


def gossip_rounds(rank: int, size: int) -> Iterator[GossipRound]:
    """The rounds of ``rank``: ceil(log2 size) of them."""
    known = 1
    while known < size:
        count = min(known, size - known)
        yield GossipRound((rank + known) % size, (rank - known) % size, count)
        known += count


def behind(rank: int, count: int, size: int) -> list[int]:
    """``rank`` and the ``count - 1`` ranks before it."""
    return [(rank - offset) % size for offset in range(count)]


def simulate_gossip(vectors: np.ndarray) -> tuple[int, np.ndarray]:
    """The exchange of ``[P, W]`` without processes: rounds, and what each rank knows in the end ``[P, P, W]``.

    Raises:
        RuntimeError: a rank would send what it does not know.
    """
    size = len(vectors)
    schedules = [list(gossip_rounds(rank, size)) for rank in range(size)]
    knows = np.zeros((size, *vectors.shape), dtype=vectors.dtype)
    has = np.eye(size, dtype=bool)
    knows[np.arange(size), np.arange(size)] = vectors
    rounds = {len(schedule) for schedule in schedules}
    if len(rounds) != 1:
        raise RuntimeError(f"ranks disagree about the number of rounds: {sorted(rounds)}")
    for number in range(rounds.pop()):
        sent = []
        for rank, schedule in enumerate(schedules):
            whose = behind(rank, schedule[number].count, size)
            if not has[rank, whose].all():
                raise RuntimeError(f"rank {rank} does not know in round {number} what it has to send")
            sent.append((schedule[number].target, whose, knows[rank, whose].copy()))
        for target, whose, values in sent:
            knows[target, whose] = values
            has[target, whose] = True
    if not has.all():
        raise RuntimeError(f"{int((~has).sum())} vectors did not arrive")
    return len(schedules[0]), knows

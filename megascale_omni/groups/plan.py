"""The plan of one module and step: who belongs to which expert's group, and whether tokens or pages travel.

A pure function of what every rank knows after the counts were exchanged, so that all ranks make the same plan without
another word. Shapes: P ranks, E experts; ``counts_PE[p, e]`` tokens of rank ``p`` that chose expert ``e``,
``only_PE[p, e]`` those of them that chose no other expert of the same rank, ``rows_PP[p, q]`` tokens of ``p`` that
chose any expert of ``q``.

[Note: tokens or pages]
An expert whose pages travel saves its owner the rows of tokens that chose it alone, or, where all experts of the owner
travel, all rows. So for each owner three plans are compared: tokens only; pages for each expert that costs less than
the rows it saves by itself; pages for all its experts. The cheapest under the link model wins; of equal ones the
earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from megascale_omni.groups.rows import mask_bytes
from megascale_omni.topology.links import LinkCosts

Move = Literal["auto", "tokens", "pages"]

PAGE_BATCH = 4
"""Experts whose pages are on their way together."""

GRADIENT_WIDTH = 4
"""Bytes of an element of a gradient that goes home: parts of a sum travel in fp32."""


@dataclass(frozen=True)
class Demand:
    """What the ranks exchanged (see the module)."""

    counts_PE: np.ndarray
    only_PE: np.ndarray
    rows_PP: np.ndarray

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return int(self.counts_PE.shape[0])

    @classmethod
    def width(cls, *, experts: int, ranks: int) -> int:
        """Integers that a rank tells the others."""
        return 2 * experts + ranks

    @classmethod
    def from_vectors(cls, vectors: np.ndarray, *, experts: int) -> Demand:
        """From ``[P, 2 E + P]``: counts, only, rows of each rank."""
        return cls(vectors[:, :experts], vectors[:, experts : 2 * experts], vectors[:, 2 * experts :])


@dataclass(frozen=True)
class TravelCosts:
    """Seconds of what travels: bytes of a row and of an expert there and back, and the links between ranks.

    Attributes:
        row_bytes: of one token to one rank: forward and backward, both ways.
        expert_bytes: of one expert to one member: weights forward and backward, gradients back.
        links: between the ranks.
    """

    row_bytes: int
    expert_bytes: int
    links: LinkCosts

    @classmethod
    def of_layer(
        cls, *, hidden: int, width: int, local_experts: int, expert_numel: int, links: LinkCosts
    ) -> TravelCosts:
        """Of a layer whose tokens have ``hidden`` elements of ``width`` bytes, as its experts' have."""
        expert_bytes = expert_numel * (2 * width + GRADIENT_WIDTH)
        return cls(4 * hidden * width + mask_bytes(local_experts) + 8, expert_bytes, links)


@dataclass(frozen=True)
class ExpertGroups:
    """Who belongs together: for each expert its owner and the ranks whose tokens chose it, ascending."""

    owners_E: np.ndarray
    members: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PageMove:
    """An expert whose pages go from ``owner`` to ``members`` (other ranks, ascending).

    ``tokens``: of all ranks that chose it. ``at_home``: whether the owner's own did; it computes it as members do.
    """

    expert: int
    owner: int
    members: tuple[int, ...]
    tokens: int = 0
    at_home: bool = False

    @property
    def computed_by(self) -> tuple[int, ...]:
        """The ranks that have tokens for it, ascending."""
        return tuple(sorted((*self.members, self.owner))) if self.at_home else self.members

    def involves(self, rank: int) -> bool:
        """Whether ``rank`` sends or receives."""
        return rank == self.owner or rank in self.members


@dataclass(frozen=True)
class Plan:
    """Who talks to whom. ``moves`` ascend by expert; all other experts are reached by rows of tokens."""

    demand: Demand
    groups: ExpertGroups
    moves: tuple[PageMove, ...]

    @property
    def owners_E(self) -> np.ndarray:
        """The rank that keeps each expert."""
        return self.groups.owners_E

    @cached_property
    def paged_E(self) -> np.ndarray:
        """Which experts' pages travel."""
        mask = np.zeros(len(self.owners_E), dtype=bool)
        mask[[move.expert for move in self.moves]] = True
        return mask

    @cached_property
    def pairs_PP(self) -> np.ndarray:
        """(row, expert) pairs from each rank to each; experts whose pages travel get none."""
        ranks = self.demand.ranks
        result = np.zeros((ranks, ranks), dtype=np.int64)
        travelling = np.where(self.paged_E[None, :], 0, self.demand.counts_PE)
        np.add.at(result.T, self.owners_E, travelling.T)
        return result

    @cached_property
    def keeps_token_rows(self) -> np.ndarray:
        """``[E]``: the experts that tokens reach as rows."""
        mask: np.ndarray = ~self.paged_E
        return mask

    def batches(self) -> tuple[tuple[PageMove, ...], ...]:
        """The moves, ``PAGE_BATCH`` at a time."""
        return tuple(self.moves[i : i + PAGE_BATCH] for i in range(0, len(self.moves), PAGE_BATCH))


def ranks_of(bits: bytes, ranks: int) -> tuple[int, ...]:
    """The ranks of a membership, a bit each, ascending."""
    return tuple(np.nonzero(np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=ranks))[0].tolist())


def make_groups(
    active_PE: np.ndarray, owners_E: np.ndarray, members_of: Callable[[bytes, int], tuple[int, ...]] = ranks_of
) -> ExpertGroups:
    """The groups of all experts: ``active_PE[p, e]``, whether tokens of rank ``p`` chose expert ``e``.

    ``members_of``: as :func:`ranks_of`, perhaps from a cache.
    """
    members_PE = active_PE.copy()
    members_PE[owners_E, np.arange(len(owners_E))] = True
    bits_EB = np.packbits(members_PE, axis=0).T
    return ExpertGroups(owners_E, tuple(members_of(bits.tobytes(), len(active_PE)) for bits in bits_EB))


def make_plan(demand: Demand, groups: ExpertGroups, costs: TravelCosts, move: Move = "auto") -> Plan:
    """Decides for every expert whether tokens or pages travel (see [Note: tokens or pages])."""
    if move == "tokens" or demand.ranks == 1:
        return Plan(demand, groups, ())
    owners_E = groups.owners_E
    chosen = np.ones(len(owners_E), dtype=bool) if move == "pages" else _cheaper_as_pages(demand, owners_E, costs)
    moves = []
    for expert in np.nonzero(chosen)[0].tolist():
        owner = int(owners_E[expert])
        members = tuple(p for p in groups.members[expert] if p != owner)
        if members:
            counts_P = demand.counts_PE[:, expert]
            moves.append(PageMove(expert, owner, members, int(counts_P.sum()), bool(counts_P[owner])))
    return Plan(demand, groups, tuple(moves))


def _cheaper_as_pages(demand: Demand, owners_E: np.ndarray, costs: TravelCosts) -> np.ndarray:
    away_PE = owners_E[None, :] != np.arange(demand.ranks)[:, None]
    member_PE = (demand.counts_PE > 0) & away_PE
    per_byte_PE, latency_PE = costs.links.seconds_per_byte_PP[:, owners_E], costs.links.latency_PP[:, owners_E]
    pages_E = (member_PE * (costs.expert_bytes * per_byte_PE + latency_PE)).sum(0)
    saved_E = (demand.only_PE * away_PE * costs.row_bytes * per_byte_PE).sum(0)
    single_E = member_PE.any(0) & (pages_E < saved_E)
    rows_P = (demand.rows_PP * costs.row_bytes * costs.links.seconds_per_byte_PP).sum(0)
    chosen = np.zeros(len(owners_E), dtype=bool)
    for owner in range(demand.ranks):
        own_E = owners_E == owner
        some = rows_P[owner] + (pages_E - saved_E)[own_E & single_E].sum()
        every = pages_E[own_E].sum()
        if every < min(some, rows_P[owner]):
            chosen |= own_E
        elif some < rows_P[owner]:
            chosen |= own_E & single_E
    return chosen

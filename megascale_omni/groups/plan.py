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
        cls,
        *,
        hidden: int,
        width: int,
        local_experts: int,
        expert_numel: int,
        links: LinkCosts,
        gradient_width: int = GRADIENT_WIDTH,
    ) -> TravelCosts:
        """Of a layer whose tokens have ``hidden`` elements of ``width`` bytes, as its experts' have."""
        expert_bytes = expert_numel * (2 * width + gradient_width)
        return cls(4 * hidden * width + mask_bytes(local_experts) + 8, expert_bytes, links)


@dataclass(frozen=True)
class ExpertGroup:
    """Who exchanges an expert's pages, all that follows from who has tokens for it; made once a membership.

    Attributes: owner: keeps it. members: other ranks with tokens for it, ascending. computed_by: all of them, the owner
    if it has any, ascending: it computes such an expert as members do. involved: the owner and the members.
    """

    owner: int
    members: tuple[int, ...]
    computed_by: tuple[int, ...]
    involved: frozenset[int]

    @classmethod
    def of(cls, active: bytes, owner: int, ranks: int) -> ExpertGroup:
        """From a bit for each rank with tokens for the expert."""
        bits = np.unpackbits(np.frombuffer(active, dtype=np.uint8), count=ranks)
        computed_by = tuple(np.nonzero(bits)[0].tolist())
        members = tuple(rank for rank in computed_by if rank != owner)
        return cls(owner, members, computed_by, frozenset((owner, *members)))


@dataclass(frozen=True)
class ExpertGroups:
    """Who belongs together: for each expert its owner, and its group."""

    owners_E: np.ndarray
    of_experts: tuple[ExpertGroup, ...]


@dataclass(frozen=True)
class PageMove:
    """An expert whose pages go from its group's owner to the members. ``tokens``: of all ranks that chose it."""

    expert: int
    group: ExpertGroup
    tokens: int = 0

    @property
    def owner(self) -> int:
        """The rank that keeps it."""
        return self.group.owner

    @property
    def members(self) -> tuple[int, ...]:
        """Other ranks with tokens for it, ascending."""
        return self.group.members

    @property
    def computed_by(self) -> tuple[int, ...]:
        """The ranks that have tokens for it, ascending."""
        return self.group.computed_by

    def involves(self, rank: int) -> bool:
        """Whether ``rank`` sends or receives."""
        return rank in self.group.involved


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


def make_groups(
    active_PE: np.ndarray, owners_E: np.ndarray, group_of: Callable[[bytes, int, int], ExpertGroup] = ExpertGroup.of
) -> ExpertGroups:
    """The groups of all experts: ``active_PE[p, e]``, whether tokens of rank ``p`` chose expert ``e``.

    ``group_of``: as :meth:`ExpertGroup.of`, perhaps from a cache.
    """
    ranks, bits_EB = len(active_PE), np.packbits(active_PE, axis=0).T
    found = (group_of(bits.tobytes(), owner, ranks) for bits, owner in zip(bits_EB, owners_E.tolist(), strict=True))
    return ExpertGroups(owners_E, tuple(found))


def make_plan(demand: Demand, groups: ExpertGroups, costs: TravelCosts, move: Move = "auto") -> Plan:
    """Decides for every expert whether tokens or pages travel (see [Note: tokens or pages])."""
    if move == "tokens" or demand.ranks == 1:
        return Plan(demand, groups, ())
    owners_E = groups.owners_E
    chosen = np.ones(len(owners_E), dtype=bool) if move == "pages" else _cheaper_as_pages(demand, owners_E, costs)
    moves = []
    for expert in np.nonzero(chosen)[0].tolist():
        group = groups.of_experts[expert]
        if group.members:
            moves.append(PageMove(expert, group, int(demand.counts_PE[:, expert].sum())))
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

"""Placements from what routers chose: one layer after the other, from a run's record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megascale_omni.topology.levels import Topology
from megascale_omni.topology.placement import Placement, Slots, in_order, moves_between, pairs_of, place
from megascale_omni.topology.routing import read_record, records_of
from megascale_omni.topology.simulate import slot_of_expert


@dataclass(frozen=True)
class PlannedLayer:
    """A layer's placement. Trips: other ranks that a token goes to, in the mean over the record."""

    number: int
    slots: Slots
    trips_before: float
    trips_after: float
    moves: int


@dataclass
class _Seen:
    """What a record says of a layer: who chose what together, and a sample of maps to count trips with."""

    pairs_EE: np.ndarray
    counts_PE: np.ndarray
    sample: list[tuple[int, np.ndarray]]


_SAMPLED_MAPS = 64


def plan_layers(
    folder: str | Path, *, ranks: int, topology: Topology | None = None, before: Placement | None = None
) -> list[PlannedLayer]:
    """A placement of every layer of a record on groups of ``ranks`` ranks (rank ``r`` of the job is ``r % ranks``).

    Raises:
        ValueError: no record, experts that the ranks cannot divide, or a topology with fewer ranks.
    """
    if ranks < 1:
        raise ValueError(f"groups of {ranks} ranks hold no experts; give 1 or more")
    if topology is not None and topology.num_ranks < ranks:
        raise ValueError(f"the topology has {topology.num_ranks} ranks, a group has {ranks}; add nodes to it")
    planned = []
    for number, seen in sorted(_seen(folder, ranks).items()):
        old = None if before is None else before.of_layer(number)
        experts = len(seen.pairs_EE)
        slots = place(
            seen.pairs_EE,
            ranks=ranks,
            topology=topology,
            members=None if topology is None else range(ranks),
            counts_PE=seen.counts_PE,
            before=old,
        )
        now = old if old is not None and len(old) == ranks else in_order(experts, ranks)
        planned.append(
            PlannedLayer(
                number,
                slots,
                trips(seen.sample, now),
                trips(seen.sample, slots),
                len(moves_between(old if old is not None else now, slots)),
            )
        )
    return planned


def _seen(folder: str | Path, ranks: int) -> dict[int, _Seen]:
    layers: dict[int, _Seen] = {}
    for number, path in enumerate(records_of(folder)):
        for record in read_record(path):
            experts = record.map_TE.shape[1]
            if record.layer not in layers:
                empty = np.zeros((experts, experts), dtype=np.int64), np.zeros((ranks, experts), dtype=np.int64)
                layers[record.layer] = _Seen(*empty, [])
            seen = layers[record.layer]
            seen.pairs_EE += pairs_of(record.map_TE)
            seen.counts_PE[number % ranks] += record.map_TE.sum(0)
            if len(seen.sample) < _SAMPLED_MAPS:
                seen.sample.append((number % ranks, record.map_TE))
    return layers


def trips(sample: list[tuple[int, np.ndarray]], slots: Slots) -> float:
    """Other ranks that a token goes to, in the mean over ``(rank, map [T, E])``."""
    total, tokens, local = 0, 0, len(slots[0])
    order = np.argsort(slot_of_expert(slots))
    for rank, map_TE in sample:
        needs_TP: np.ndarray = np.asarray(map_TE[:, order].reshape(len(map_TE), len(slots), local).any(2))
        needs_TP[:, rank] = False
        total, tokens = total + int(needs_TP.sum()), tokens + len(map_TE)
    return total / tokens if tokens else 0.0

"""Bytes and seconds of a MoE layer's exchanges at any size: stock's two dispatchers, and groups.

Bytes are exactly those that the dispatchers give to collective calls in one forward and backward, metadata included;
seconds follow from the topology. Shapes: P ranks of one expert-parallel group, E experts.

[Note: seconds of an exchange]
Every rank sends and receives over each level's links at that level's bandwidth, over all levels at once; the exchange
takes as long as the busiest rank at its slowest level, and a latency of the widest level for each round. All-gather and
reduce-scatter go round a ring, as NCCL's do: each rank sends to its neighbour only, in P - 1 rounds. The others send
directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megascale_omni.groups.gossip import Discovery, gossip_rounds
from megascale_omni.groups.plan import GRADIENT_WIDTH, Demand, Move, Plan, TravelCosts, make_groups, make_plan
from megascale_omni.groups.rows import mask_bytes
from megascale_omni.topology.levels import Topology
from megascale_omni.topology.links import LinkCosts
from megascale_omni.topology.placement import Slots, in_order
from megascale_omni.topology.routing import Choices

Dispatcher = Literal["alltoall", "allgather", "groups"]
DISPATCHERS: tuple[Dispatcher, ...] = ("alltoall", "allgather", "groups")


@dataclass(frozen=True)
class LayerShape:
    """What a layer's exchanges depend on.

    Attributes: hidden: elements of a token. experts: of all ranks. width, prob_width, grad_width: bytes of an element
    of tokens and weights, of a probability, of a weight's gradient. expert_numel: elements of one expert.
    """

    hidden: int
    experts: int
    expert_numel: int
    width: int = 2
    prob_width: int = 4
    grad_width: int = GRADIENT_WIDTH


@dataclass(frozen=True)
class Exchange:
    """``bytes_PP[p, q]`` from rank to rank in ``rounds`` messages one after the other."""

    what: str
    bytes_PP: np.ndarray
    rounds: int = 1


@dataclass(frozen=True)
class Simulated:
    """The exchanges of one forward and backward of one group.

    ``plan``: of the groups dispatcher.
    """

    exchanges: tuple[Exchange, ...]
    plan: Plan | None = None

    @property
    def total_bytes(self) -> int:
        """Of all ranks."""
        return round(sum(float(e.bytes_PP.sum()) for e in self.exchanges))

    @property
    def bytes_P(self) -> np.ndarray:
        """``[P]``: sent by each rank."""
        result: np.ndarray = np.sum([e.bytes_PP.sum(1) for e in self.exchanges], axis=0)
        return result

    def bytes_by_level(self, topology: Topology, members: Sequence[int] | None = None) -> dict[str, int]:
        """Of all ranks, by the name of the level that they pass."""
        level_PP, total_PP = topology.level_PP(members), np.sum([e.bytes_PP for e in self.exchanges], axis=0)
        return {level.name: round(float(total_PP[level_PP == i].sum())) for i, level in enumerate(topology.levels)}

    def seconds(self, topology: Topology, members: Sequence[int] | None = None) -> float:
        """Of all exchanges, one after the other (see [Note: seconds of an exchange])."""
        level_PP = topology.level_PP(members)
        return sum(_seconds(exchange, topology, level_PP) for exchange in self.exchanges)


def _seconds(exchange: Exchange, topology: Topology, level_PP: np.ndarray) -> float:
    longest, latency = 0.0, 0.0
    for number, level in enumerate(topology.levels):
        over_PP = np.where(level_PP == number, exchange.bytes_PP, 0)
        if over_PP.any():
            busiest = max(float(over_PP.sum(0).max()), float(over_PP.sum(1).max()))
            longest, latency = max(longest, busiest / level.bandwidth), level.latency_seconds
    return longest + exchange.rounds * latency


def demand_of(choices: Sequence[Choices], slots: Slots) -> Demand:
    """What the ranks would tell each other; columns by slot (rank, local expert)."""
    ranks, local = len(slots), len(slots[0])
    slot_E = slot_of_expert(slots)
    counts = np.zeros((ranks, ranks * local), dtype=np.int64)
    only, rows = np.zeros_like(counts), np.zeros((ranks, ranks), dtype=np.int64)
    for p, chosen in enumerate(choices):
        slot_N = slot_E[chosen.expert_N]
        counts[p] = np.bincount(slot_N, minlength=ranks * local)
        trip_N = chosen.token_N * ranks + slot_N // local
        trips, place_N, times = np.unique(trip_N, return_inverse=True, return_counts=True)
        rows[p] = np.bincount(trips % ranks, minlength=ranks)
        only[p] = np.bincount(slot_N[times[place_N] == 1], minlength=ranks * local)
    return Demand(counts, only, rows)


def slot_of_expert(slots: Slots) -> np.ndarray:
    """``[E]``: the slot ``rank * L + local`` of each expert."""
    flat = np.array([expert for rank in slots for expert in rank])
    slot_E = np.empty_like(flat)
    slot_E[flat] = np.arange(len(flat))
    return slot_E


def simulate(
    dispatcher: Dispatcher,
    choices: Sequence[Choices],
    shape: LayerShape,
    *,
    slots: Slots | None = None,
    move: Move = "tokens",
    discovery: Discovery = "allgather",
    links: LinkCosts | None = None,
) -> Simulated:
    """One forward and backward of one group; ``choices`` of each of its ranks.

    ``slots``: the groups dispatcher's placement (stock has experts in order). ``links``: what it decides by; None:
    bytes.
    """
    ranks = len(choices)
    if shape.experts % ranks:
        raise ValueError(f"{shape.experts} experts cannot be divided among {ranks} ranks evenly; choose a divisor")
    if dispatcher == "groups":
        return _groups(choices, shape, slots or in_order(shape.experts, ranks), move, discovery, links)
    if dispatcher == "allgather":
        return _allgather(choices, shape)
    demand = demand_of(choices, in_order(shape.experts, ranks))
    pairs_PP = demand.counts_PE.reshape(ranks, ranks, -1).sum(2)
    return Simulated(
        (
            _ring("counts", ranks, 8 * shape.experts),
            *_there_and_back(pairs_PP, pairs_PP, shape, extra=0),
        )
    )


def _there_and_back(rows_PP: np.ndarray, pairs_PP: np.ndarray, shape: LayerShape, *, extra: int) -> list[Exchange]:
    """Rows to experts and home, forward and backward; ``extra`` bytes a row on the first way."""
    rows, pairs = _off_diagonal(rows_PP), _off_diagonal(pairs_PP)
    row, prob = shape.hidden * shape.width, shape.prob_width
    return [
        Exchange("forward: rows", rows * (row + extra) + pairs * prob),
        Exchange("forward: rows home", rows.T * row),
        Exchange("backward: rows", rows * row),
        Exchange("backward: rows home", rows.T * row + pairs.T * prob),
    ]


def _off_diagonal(matrix_PP: np.ndarray) -> np.ndarray:
    result: np.ndarray = matrix_PP * (1 - np.eye(len(matrix_PP), dtype=np.int64))
    return result


def _ring(what: str, ranks: int, nbytes: int) -> Exchange:
    """All-gather of ``nbytes`` a rank, or reduce-scatter of ``ranks`` times as many."""
    if ranks == 1:
        return Exchange(what, np.zeros((1, 1)), 0)
    bytes_PP = np.zeros((ranks, ranks))
    bytes_PP[np.arange(ranks), (np.arange(ranks) + 1) % ranks] = (ranks - 1) * nbytes
    return Exchange(what, bytes_PP, ranks - 1)


def _gossip(what: str, ranks: int, nbytes: int) -> list[Exchange]:
    schedules = [list(gossip_rounds(rank, ranks)) for rank in range(ranks)]
    exchanges = []
    for number in range(len(schedules[0])):
        bytes_PP = np.zeros((ranks, ranks))
        for rank, schedule in enumerate(schedules):
            bytes_PP[rank, schedule[number].target] = schedule[number].count * nbytes
        exchanges.append(Exchange(f"{what}, round {number + 1}", bytes_PP))
    return exchanges


def _allgather(choices: Sequence[Choices], shape: LayerShape) -> Simulated:
    ranks, tokens = len(choices), {chosen.tokens for chosen in choices}
    if len(tokens) != 1:
        raise ValueError(f"stock's allgather dispatcher needs as many tokens on every rank, not {sorted(tokens)}")
    count = tokens.pop()
    probs, rows = count * shape.experts * shape.prob_width, count * shape.hidden * shape.width
    summed = count * shape.hidden * max(shape.width, shape.prob_width)  # outputs take the probabilities' dtype
    sizes = {
        "forward: map": count * shape.experts,
        "forward: probabilities": probs,
        "forward: rows": rows,
        "forward: sums home": summed,
        "backward: sums": summed,
        "backward: rows home": rows,
        "backward: probabilities home": probs,
    }
    return Simulated(tuple(_ring(what, ranks, nbytes) for what, nbytes in sizes.items()))


def _groups(
    choices: Sequence[Choices],
    shape: LayerShape,
    slots: Slots,
    move: Move,
    discovery: Discovery,
    links: LinkCosts | None,
) -> Simulated:
    ranks, local = len(slots), len(slots[0])
    demand = demand_of(choices, slots)
    groups = make_groups(demand.counts_PE > 0, np.repeat(np.arange(ranks), local))
    costs = TravelCosts.of_layer(
        hidden=shape.hidden,
        width=shape.width,
        local_experts=local,
        expert_numel=shape.expert_numel,
        links=links or LinkCosts.uniform(ranks),
    )
    plan = make_plan(demand, groups, costs, move)
    exchanges = _told("counts", 4 * Demand.width(experts=shape.experts, ranks=ranks), ranks, discovery)
    rows_PP = demand.rows_PP
    if plan.moves:
        exchanges += _told("rows", 4 * ranks, ranks, discovery)
        rows_PP = _kept_rows(choices, slots, plan)
        exchanges += _pages(plan, shape)
    exchanges += _there_and_back(rows_PP, plan.pairs_PP, shape, extra=mask_bytes(local))
    return Simulated(tuple(exchanges), plan)


def _told(what: str, nbytes: int, ranks: int, discovery: Discovery) -> list[Exchange]:
    return [_ring(what, ranks, nbytes)] if discovery == "allgather" else _gossip(what, ranks, nbytes)


def _kept_rows(choices: Sequence[Choices], slots: Slots, plan: Plan) -> np.ndarray:
    """``[P, P]``: rows that travel beside pages."""
    slot_E, ranks, local = slot_of_expert(slots), len(slots), len(slots[0])
    rows = np.zeros((ranks, ranks), dtype=np.int64)
    for p, chosen in enumerate(choices):
        slot_N = slot_E[chosen.expert_N]
        kept_N = plan.keeps_token_rows[slot_N]
        trips = np.unique(chosen.token_N[kept_N] * ranks + slot_N[kept_N] // local)
        rows[p] = np.bincount(trips % ranks, minlength=ranks)
    return rows


def _pages(plan: Plan, shape: LayerShape) -> list[Exchange]:
    """Weights to members, forward and backward, and gradients home, a batch at a time."""
    exchanges = []
    for batch in plan.batches():
        weights = np.zeros((plan.demand.ranks, plan.demand.ranks))
        for moved in batch:
            weights[moved.owner, list(moved.members)] += shape.expert_numel
        exchanges += [
            Exchange("forward: weight pages", weights * shape.width),
            Exchange("backward: weight pages", weights * shape.width),
            Exchange("backward: gradient pages home", weights.T * shape.grad_width),
        ]
    return exchanges

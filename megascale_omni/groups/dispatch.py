"""The dispatcher's core: tokens to experts and back, once per rank, for any training framework.

    trip = dispatcher.depart(x_Th, map_TE, probs_TE)    # counts are exchanged, the plan is made, rows travel
    y_Nh = experts(trip.x_Nh, trip.counts, trip.probs_N)
    output_Th = trip.back(y_Nh)

Where the experts gather and sum rows themselves, ``trip.finish(trip.send_back(trip.compute(experts)))`` does the same,
and what is as large as pairs are many lives in their scratch memory [Note: rows are scratch].

Shapes: T tokens of this rank, E experts of all ranks, N pairs (token, expert) of this rank's experts, sorted by expert.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from megascale_omni.bulk import TORCH, Bulk
from megascale_omni.config import GradWire
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.tokens import Segments
from megascale_omni.groups.cache import GroupCache
from megascale_omni.groups.channel import Channel
from megascale_omni.groups.discovery import Discovery, discover
from megascale_omni.groups.functions import exchange, gather, sum_rows
from megascale_omni.groups.guests import GuestHouse
from megascale_omni.groups.pages import TravellingPages
from megascale_omni.groups.plan import (
    GRADIENT_WIDTH,
    Demand,
    ExpertGroup,
    Move,
    Plan,
    TravelCosts,
    make_groups,
    make_plan,
)
from megascale_omni.groups.rows import (
    ReceivedRows,
    SendRows,
    only_expert_counts,
    received_rows,
    send_rows,
    sorted_by_expert,
)
from megascale_omni.groups.spread import all_gather_rows, gather_counts, gather_rows, scatter_sums
from megascale_omni.topology.links import LinkCosts

PairExperts = Callable[[torch.Tensor, tuple[int, ...], torch.Tensor, Segments], torch.Tensor]
"""Experts that take rows ``[R, h]``, counts, probabilities ``[N]`` and pairs, and give the sums ``[R, h]``."""


@dataclass(frozen=True)
class GroupOptions:
    """How groups are found and served.

    Attributes:
        move: tokens, pages, or for each expert what is cheaper. discovery: how counts are exchanged.
        links: seconds between ranks of the group; None: bytes decide. cache: entries of the group cache.
        grad_wire: what gradients of pages that travelled come home in: fp32, or rounded once to bf16.
    """

    move: Move = "auto"
    discovery: Discovery = "allgather"
    links: LinkCosts | None = None
    cache: int = 1024
    grad_wire: GradWire = "fp32"

    @property
    def digest(self) -> int:
        """Equal where ranks make the same plan of the same counts."""
        tables = () if self.links is None else (self.links.seconds_per_byte_PP, self.links.latency_PP)
        return zlib.crc32(
            f"{self.move} {self.discovery} {self.grad_wire}".encode() + b"".join(table.tobytes() for table in tables)
        )


@dataclass
class GroupDispatcher:
    """Dispatches the tokens of one module.

    Args:
        channel: the expert-parallel group. num_experts: of all ranks, the same number on each.
        columns: the routing's column for each (rank, local expert) slot; None where they are in this order.
        experts: the module whose pages may travel; None: tokens travel, whatever the options say.
        house: where visiting experts are computed, for all modules of a run.
        spread: the ranks over which the pages of each of this rank's experts are spread; None: they are all here.

    Raises:
        ValueError: pages that are spread and are to travel.
    """

    channel: Channel
    num_experts: int
    options: GroupOptions = field(default_factory=GroupOptions)
    columns: torch.Tensor | None = None
    experts: PagedExperts | None = None
    house: GuestHouse = field(default_factory=GuestHouse)
    spread: Channel | None = None

    def __post_init__(self) -> None:
        self.local_experts = self.num_experts // self.channel.size
        self.owners_E = np.repeat(np.arange(self.channel.size), self.local_experts)
        self.cache: GroupCache[ExpertGroup] = GroupCache(self.options.cache)
        self.calls = 0
        kinds = ("tokens", "rows_sent", "pairs_sent", "rows_spread", "experts_sent", "experts_received")
        self.counts = dict.fromkeys(kinds, 0)
        self.discovery_seconds = 0.0
        self._costs: dict[tuple[int, int], TravelCosts] = {}
        first = self.channel.rank * self.local_experts
        self.pages = None
        if self.spread is not None and self.spread.size == 1:
            self.spread = None
        if self.spread is not None and self.options.move == "pages":
            raise ValueError(
                "distributed.move=pages does not go with experts whose pages are spread over ranks "
                "(--expert-tensor-parallel-size): tokens go to where the pages are; use auto or tokens"
            )
        if self.experts is not None and self.spread is None:
            self.pages = TravellingPages(
                self.experts, self.channel, first=first, house=self.house, wire=self.options.grad_wire
            )

    @property
    def bulk(self) -> Bulk:
        """Who gathers rows and sums them."""
        return TORCH if self.experts is None else self.experts.manager.bulk

    def depart(self, x_Th: torch.Tensor, map_TE: torch.Tensor, probs_TE: torch.Tensor) -> Trip:
        """Exchanges counts, makes the plan and sends every token once to each rank that it needs.

        ``map_TE`` (bool) and ``probs_TE`` are the router's; gradients reach ``x_Th`` and ``probs_TE``.
        """
        map_TE = map_TE if self.columns is None else map_TE.index_select(1, self.columns)
        bulk = self.bulk
        sent = send_rows(map_TE, ranks=self.channel.size, columns=self.columns, bulk=bulk)
        plan = self._plan(map_TE, sent, x_Th)
        rows_P = plan.demand.rows_PP[:, self.channel.rank]
        if self.pages is not None and self.options.move != "tokens":
            self.pages.prepare(plan)
        if plan.moves:
            kept_E = torch.from_numpy(plan.keeps_token_rows).to(map_TE.device)
            sent = send_rows(map_TE & kept_E, ranks=self.channel.size, columns=self.columns, bulk=bulk)
            told = torch.tensor(sent.rows, dtype=torch.int32, device=map_TE.device)
            rows_P = discover(told, self.channel, self.options.discovery)[:, self.channel.rank]
        trip = Trip(self, plan, sent, map_TE, x_Th, probs_TE, tuple(rows_P.tolist()))
        self.calls += 1
        self._count(len(x_Th), sent, plan)
        return trip

    def _count(self, tokens: int, sent: SendRows, plan: Plan) -> None:
        rank = self.channel.rank
        found = {
            "tokens": tokens,
            "rows_sent": sum(sent.rows) - sent.rows[rank],
            "pairs_sent": sum(sent.pairs) - sent.pairs[rank],
            "experts_sent": sum(len(move.members) for move in plan.moves if move.owner == rank),
            "experts_received": sum(rank in move.members for move in plan.moves),
        }
        for name, count in found.items():
            self.counts[name] += count

    def stats(self) -> dict[str, float]:
        """Counts since the start: forwards, tokens, rows and (row, expert) pairs to other ranks, rows to ranks with
        other pages of the same experts, experts whose pages went out and came in a forward, look-ups of the group
        cache, seconds in which counts were exchanged.
        """
        cache = {"group_cache_hits": self.cache.hits, "group_cache_misses": self.cache.misses}
        return {"forwards": self.calls, **self.counts, **cache, "discovery_seconds": self.discovery_seconds}

    def _plan(self, map_TE: torch.Tensor, sent: SendRows, x_Th: torch.Tensor) -> Plan:
        size, experts = self.channel.size, self.num_experts
        vector = torch.cat(
            [
                map_TE.sum(0),
                only_expert_counts(map_TE, ranks=size),
                torch.tensor(sent.rows, device=map_TE.device),
            ]
        ).to(torch.int32)
        start = time.perf_counter()
        told = discover(vector, self.channel, self.options.discovery)
        self.discovery_seconds += time.perf_counter() - start
        demand = Demand.from_vectors(told, experts=experts)
        groups = make_groups(demand.counts_PE > 0, self.owners_E, self._group_of)
        move: Move = "tokens" if self.pages is None else self.options.move
        return make_plan(demand, groups, self._travel_costs(x_Th), move)

    def _group_of(self, active: bytes, owner: int, ranks: int) -> ExpertGroup:
        return self.cache.get((active, owner), step=self.calls, make=lambda: ExpertGroup.of(active, owner, ranks))

    def _travel_costs(self, x_Th: torch.Tensor) -> TravelCosts:
        hidden, width = x_Th.shape[1], x_Th.element_size()
        key = (hidden, width)
        if key not in self._costs:
            self._costs[key] = TravelCosts.of_layer(
                hidden=hidden,
                width=width,
                local_experts=self.local_experts,
                expert_numel=0 if self.pages is None else self.pages.expert_numel,
                links=self.options.links or LinkCosts.uniform(self.channel.size),
                gradient_width=GRADIENT_WIDTH if self.options.grad_wire == "fp32" else 2,
            )
        return self._costs[key]


def total_stats(stats: Iterable[dict[str, float]]) -> dict[str, float] | None:
    """The sums over modules of :meth:`GroupDispatcher.stats`, and the share of hits; None where there are none."""
    total: dict[str, float] = {}
    for one in stats:
        for name, value in one.items():
            total[name] = total.get(name, 0) + value
    if not total:
        return None
    looked_up = total["group_cache_hits"] + total["group_cache_misses"]
    return {**total, "group_cache_hit_rate": total["group_cache_hits"] / looked_up if looked_up else 0.0}


class Trip:
    """Tokens on their way through one forward of a module.

    Attributes: x_Nh, probs_N, counts: what this rank's experts get. plan: of this call.
    """

    def __init__(
        self,
        dispatcher: GroupDispatcher,
        plan: Plan,
        sent: SendRows,
        map_TE: torch.Tensor,
        x_Th: torch.Tensor,
        probs_TE: torch.Tensor,
        rows: tuple[int, ...],
    ) -> None:
        self.plan = plan
        self._dispatcher, self._channel, self._sent, self._rows = dispatcher, dispatcher.channel, sent, rows
        pairs = tuple(plan.pairs_PP[:, self._channel.rank].tolist())
        channel = self._channel
        self._arrived_Rh = exchange(gather(x_Th, sent.segments), channel, sent.rows, rows)
        self._mask_RB = channel.exchange(sent.mask_RB, sent.rows, rows)
        wire_N = exchange(probs_TE.reshape(-1).index_select(0, sent.pairs_N), channel, sent.pairs, pairs)
        self._wire_N = wire_N
        self._guest_inputs = self._guests(map_TE, x_Th, probs_TE) if self._involved else None
        self._received: ReceivedRows | None = None
        self._spread_rows: tuple[int, ...] = ()

    @property
    def _involved(self) -> bool:
        return any(move.involves(self._channel.rank) for move in self.plan.moves)

    def arrive(self) -> tuple[torch.Tensor, tuple[int, ...], torch.Tensor]:
        """Tokens ``[N, h]`` sorted by local expert, counts of each, probabilities ``[N]``."""
        x_Rh, probs_N, self._received = self._arrive()
        return gather(x_Rh, self._received.segments), self._received.counts, probs_N

    def compute(self, experts: PairExperts) -> torch.Tensor:
        """Instead of :meth:`arrive` and :meth:`partial_sums`: the partial sums of ``experts``, called with the rows
        that came, counts of each expert, probabilities ``[N]`` and the pairs as :class:`Segments` of the rows.
        """
        x_Rh, probs_N, received = self._arrive()
        return self._scattered(experts(x_Rh, received.counts, probs_N, received.segments))

    def _arrive(self) -> tuple[torch.Tensor, torch.Tensor, ReceivedRows]:
        if self._dispatcher.spread is not None:
            self._gather_for(self._dispatcher.spread)
        received = received_rows(
            self._mask_RB, local_experts=self._dispatcher.local_experts, bulk=self._dispatcher.bulk
        )
        x_Rh, probs_N = self._arrived_Rh, self._wire_N.index_select(0, received.wire_N)
        del self._arrived_Rh, self._mask_RB, self._wire_N
        return x_Rh, probs_N, received

    def _gather_for(self, spread: Channel) -> None:
        """Rows that arrived at any of these ranks come to all of them (see [Note: spread experts])."""
        arrived = (len(self._arrived_Rh), len(self._wire_N))
        self._spread_rows, pairs = gather_counts(arrived, spread, device=self._mask_RB.device)
        self._arrived_Rh = gather_rows(self._arrived_Rh, spread, self._spread_rows)
        self._mask_RB = all_gather_rows(self._mask_RB, spread, self._spread_rows)
        self._wire_N = gather_rows(self._wire_N, spread, pairs)
        self._dispatcher.counts["rows_spread"] += arrived[0] * (spread.size - 1)

    def partial_sums(self, y_Nh: torch.Tensor) -> torch.Tensor:
        """Outputs of this rank's experts, and of their pages elsewhere, summed to one row for each row that came."""
        assert self._received is not None
        return self._scattered(sum_rows(y_Nh, self._received.segments))

    def _scattered(self, y_Rh: torch.Tensor) -> torch.Tensor:
        spread = self._dispatcher.spread
        return y_Rh if spread is None else scatter_sums(y_Rh, spread, self._spread_rows)

    def send_back(self, y_Rh: torch.Tensor) -> torch.Tensor:
        """Partial sums go home; returns those of this rank's tokens."""
        return exchange(y_Rh, self._channel, self._rows, self._sent.rows)

    def finish(self, home_Rh: torch.Tensor) -> torch.Tensor:
        """Outputs ``[T, h]``: the sums of each token's rows, and of the experts whose pages came here."""
        output_Th = sum_rows(home_Rh, self._sent.segments)
        if self._guest_inputs is None:
            return output_Th
        assert self._dispatcher.pages is not None
        x_Gh, probs_G, counts, chosen = self._guest_inputs
        y_Gh = self._dispatcher.pages.apply(x_Gh, probs_G, counts, self.plan)
        return output_Th + sum_rows(y_Gh, chosen.segments)

    def back(self, y_Nh: torch.Tensor) -> torch.Tensor:
        """The whole way home."""
        return self.finish(self.send_back(self.partial_sums(y_Nh)))

    def _guests(
        self, map_TE: torch.Tensor, x_Th: torch.Tensor, probs_TE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...], ReceivedRows]:
        """Tokens of this rank for experts whose pages travel, sorted by expert."""
        moved = torch.tensor([move.expert for move in self.plan.moves], device=map_TE.device)
        chosen = sorted_by_expert(map_TE.index_select(1, moved), bulk=self._dispatcher.bulk)
        columns = self._dispatcher.columns
        column_M = moved if columns is None else columns[moved]
        column_G = column_M.repeat_interleave(torch.tensor(chosen.counts, device=map_TE.device))
        places_G = chosen.row_N * map_TE.shape[1] + column_G
        probs_G = probs_TE.reshape(-1).index_select(0, places_G)
        return gather(x_Th, chosen.segments), probs_G, chosen.counts, chosen

"""Pages that travel: an expert's weights go to the ranks whose tokens chose it, its gradients come back to its owner.

Experts travel in batches of four, by ascending expert. The pages of the next batch are on their way while the current
one is computed. Only owner and members take part; each of them meets the transfers of a pair of ranks in one order, so
that overlapping groups cannot wait for each other in a circle. For that a rank counts batches that it has no share in:
weights of a batch start where the batch before it begins, and the gradients of that one come after them, for everybody.

[Note: guests]
A member computes a visiting expert with the same code as its own: a small ``PagedExperts`` module, with pages in an
arena of its own that no budget counts, holds one batch of visitors; one such room serves all layers that are alike.
Visitors are gone when the batch is done; the backward fetches the weights again, as recomputation would. The owner
computes its own tokens for an expert that travels in the same way. Each rank's part of the weight gradient is kept in
fp32, unrounded, and so it travels, or (``bf16`` on the wire) rounded once; parts are added at home in fp32, by
ascending rank, and the sum is rounded where stock rounds: to the weights' dtype, before it is added to the gradient of
the step. All pages of a batch are copied at once.

[Note: buffers of what travels]
An expert's buffer is as large whoever belongs to its group. So buffers are lent by the house, to all groups and layers
in turn, and given back when their batch has been taken in: there are never more than two batches need, and groups that
recur find theirs. The same groups' plans are found in the group cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megascale_omni.config import GradWire
from megascale_omni.experts.function import forward_phase
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.shards import PageName
from megascale_omni.groups.channel import Channel, Transfer, Transfers
from megascale_omni.groups.guests import GuestHouse
from megascale_omni.groups.plan import PAGE_BATCH, PageMove, Plan
from megascale_omni.paging.planes import Plane
from megascale_omni.schedule import Phase

Batch = tuple[PageMove, ...]


def expert_numel(experts: PagedExperts) -> int:
    """Elements of one expert, all pages."""
    layout = experts.layout
    return sum(layout.page_numel(slice_) for slice_ in range(layout.num_slices))


def _parts(experts: PagedExperts, expert: int, flat: torch.Tensor) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
    layout = experts.layout
    sizes = [layout.page_numel(slice_) for slice_ in range(layout.num_slices)]
    for slice_, part in enumerate(flat.split(sizes)):
        yield (expert, slice_), part


def empty_weights(experts: PagedExperts) -> torch.Tensor:
    """Room for one expert's weights."""
    dtype, device = experts.pages.dtypes[Plane.WEIGHT], experts.manager.arena.device
    return torch.empty(expert_numel(experts), dtype=dtype, device=device)


def read_weights(experts: PagedExperts, expert: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """A copy of a local expert's weight pages, caught up with the optimizer; in ``out`` where that is given."""
    flat = empty_weights(experts) if out is None else out
    parts = dict(_parts(experts, expert, flat))
    for names in _leased_together(experts, list(parts)):
        experts.manager.catch_up(experts.pages, experts.page_ids(Plane.WEIGHT, names))
        with experts.lease(Plane.WEIGHT, names) as lease:
            experts.manager.bulk.copy([(lease.page(*name), parts[name]) for name in names])
    return flat


def _leased_together(experts: PagedExperts, names: list[PageName]) -> list[list[PageName]]:
    """Pages that are worked on at once: one by one where they have to be brought, and an expert may not fit."""
    return [[name] for name in names] if experts.manager.pager.can_evict else [names]


def write_weights(experts: PagedExperts, expert: int, flat: torch.Tensor) -> None:
    """Copies ``flat`` into a local expert's weight pages, which exist."""
    for name, part in _parts(experts, expert, flat):
        with experts.lease(Plane.WEIGHT, [name]) as lease:
            lease.mark_dirty()
            lease.page(*name).copy_(part)


@dataclass
class Travelling:
    """A batch on its way: what is under way, what arrives by expert (gradients: by ascending rank), and loans."""

    transfers: Transfers
    arriving: dict[int, list[torch.Tensor]]
    lent: list[torch.Tensor]

    def arrived(self) -> dict[int, list[torch.Tensor]]:
        """Waits for it."""
        self.transfers.wait()
        return self.arriving


class TravellingPages:
    """The page travel of one module on one rank.

    Args:
        experts: the module, with the experts of this rank. channel: its expert-parallel group.
        first: the number of this rank's first expert among all experts. house: where visitors are computed.
        wire: what gradients come home in (``bf16`` changes the mathematics, by one rounding).
    """

    def __init__(
        self, experts: PagedExperts, channel: Channel, *, first: int, house: GuestHouse, wire: GradWire = "fp32"
    ) -> None:
        self.wire = torch.bfloat16 if wire == "bf16" else torch.float32
        self.experts = experts
        self.channel = channel
        self.first = first
        self._house = house

    @property
    def expert_numel(self) -> int:
        """Elements of one expert, all pages."""
        return expert_numel(self.experts)

    @property
    def guests(self) -> PagedExperts:
        """The module that computes visitors (see [Note: guests])."""
        return self._house.room(self.experts)

    def prepare(self, plan: Plan) -> None:
        """Makes this rank's experts current that are about to travel; called whether any are, as others may have some.

        (See [Note: pages on demand]: it is a collective of the ranks that have copies of these experts.)
        """
        if self.experts.fetch is not None:
            self.experts.fetch([m.expert - self.first for m in plan.moves if m.owner == self.channel.rank])

    def apply(self, x_Gh: torch.Tensor, probs_G: torch.Tensor, counts: Sequence[int], plan: Plan) -> torch.Tensor:
        """Outputs ``[G, h]`` of tokens that stay here, sorted by visiting expert; ``counts`` of each of the moves.

        To be called by every rank that a move involves, with or without tokens of its own.
        """
        visit = _Visit.of(self, counts, plan)
        anchor = self.experts._anchor
        keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x_Gh, probs_G, anchor))
        result: torch.Tensor = _Travel.apply(x_Gh, probs_G, anchor, visit, keep)
        return result

    def announce(self, visit: _Visit, phase: Phase) -> None:
        """Tells whoever keeps heat how many tokens this rank's travelling experts have, wherever those are."""
        if phase is not Phase.FORWARD:
            return
        counts = [0] * self.experts.num_experts
        for move in (move for batch in visit.batches for move in batch if move.owner == self.channel.rank):
            counts[move.expert - self.first] = move.tokens
        if any(counts):
            self.experts.manager.routed(self.experts.pages, counts)

    # -- weights -------------------------------------------------------------------------------------------------------

    def _borrow(self, dtype: torch.dtype, lent: list[torch.Tensor]) -> torch.Tensor:
        """Room for one expert (see [Note: buffers of what travels]); ``lent`` notes what is to be given back."""
        numel = self.expert_numel
        lent.append(self._house.buffers(self.experts.manager.arena.device, dtype).lend(numel, dtype))
        return lent[-1][:numel]

    def _give_back(self, travelling: Travelling) -> None:
        for buffer in travelling.lent:
            self._house.buffers(self.experts.manager.arena.device, buffer.dtype).give_back(buffer)
        travelling.lent, travelling.arriving = [], {}

    def start_weights(self, batch: Batch) -> Travelling:
        """Sends and receives the weights of a batch; what arrives is what this rank computes with."""
        transfers: list[Transfer] = []
        arriving: dict[int, list[torch.Tensor]] = {}
        lent: list[torch.Tensor] = []
        dtype, rank = self.experts.pages.dtypes[Plane.WEIGHT], self.channel.rank
        for move in batch:
            if not move.involves(rank):
                continue
            flat = self._borrow(dtype, lent)
            if move.owner == rank:
                read_weights(self.experts, move.expert - self.first, flat)
                transfers += [Transfer(peer, flat, True) for peer in move.members]
            else:
                transfers.append(Transfer(move.owner, flat, False))
            if rank in move.computed_by:
                arriving[move.expert] = [flat]
        return Travelling(self.channel.transfer(transfers), arriving, lent)

    def welcome(self, batch: Batch, weights: Travelling) -> PagedExperts:
        """The guests' module with the weights of a batch; visitor ``i`` is the batch's move ``i``."""
        guests = self.guests
        manager = guests.manager
        arrived = weights.arrived()
        present = [i for i, move in enumerate(batch) if move.expert in arrived]
        manager.create(guests.pages, Plane.WEIGHT, present)
        parts = {n: part for i in present for n, part in self._parts(i, arrived[batch[i].expert][0])}
        if parts:
            with guests.lease(Plane.WEIGHT, list(parts)) as lease:  # nothing of theirs ever leaves
                manager.bulk.copy([(part, lease.page(*name)) for name, part in parts.items()])
        self._give_back(weights)
        return guests

    def farewell(self) -> None:
        """Drops all visitors."""
        guests = self.guests
        for plane in (Plane.WEIGHT, Plane.GRADIENT):
            ids = guests.manager.ids(guests.pages, plane, range(PAGE_BATCH))
            guests.manager.drop(ids[guests.manager.table.tier[ids] != 0])

    # -- gradients -----------------------------------------------------------------------------------------------------

    def gradients_of(self, place: int, lent: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """A visitor's gradient pages, fp32, or rounded to bf16; zeros where it got none."""
        guests, flat = self.guests, self._borrow(dtype, lent)
        present, parts = guests.manager.present(guests.pages, Plane.GRADIENT), dict(self._parts(place, flat))
        names = [name for name in parts if present[name]]
        for name in parts.keys() - set(names):
            parts[name].zero_()
        if names:
            with guests.lease(Plane.GRADIENT, names) as lease:
                pages, bulk = [lease.page(*name) for name in names], guests.manager.bulk
                if dtype is torch.float32:
                    bulk.copy([(page, parts[name]) for page, name in zip(pages, names, strict=True)])
                elif len(names) == len(parts):
                    bulk.pack(pages, flat)
                else:
                    for page, name in zip(pages, names, strict=True):
                        bulk.pack([page], parts[name])
        return flat

    def start_gradients(self, batch: Batch) -> Travelling:
        """Sends visitors' gradients home; what arrives is the parts of this rank's experts."""
        transfers: list[Transfer] = []
        arriving: dict[int, list[torch.Tensor]] = {}
        lent: list[torch.Tensor] = []
        for place, move in enumerate(batch):
            if move.owner == self.channel.rank:
                parts = arriving[move.expert] = []
                for peer in move.computed_by:
                    if peer == move.owner:
                        parts.append(self.gradients_of(place, lent, torch.float32))  # what stays is not rounded
                    else:
                        parts.append(self._borrow(self.wire, lent))
                        transfers.append(Transfer(peer, parts[-1], False))
            elif self.channel.rank in move.members:
                transfers.append(Transfer(move.owner, self.gradients_of(place, lent, self.wire), True))
        return Travelling(self.channel.transfer(transfers), arriving, lent)

    def take_home(self, gradients_home: Travelling) -> None:
        """Adds gradients that come home to this rank's pages, each expert's parts as one gradient."""
        experts = self.experts
        for expert, gradients in sorted(gradients_home.arrived().items()):
            total = self._sum(gradients, gradients_home.lent).to(experts.pages.dtypes[Plane.WEIGHT])
            for name, part in self._parts(expert - self.first, total):
                ids = experts.page_ids(Plane.GRADIENT, [name])
                new = experts.manager.create_ids(experts.pages, Plane.GRADIENT, ids)
                with experts.lease(Plane.GRADIENT, [name]) as lease:
                    page = lease.page(*name)
                    if len(new):
                        page.copy_(part)
                    else:
                        page.add_(part)
                    lease.mark_dirty()
        self._give_back(gradients_home)

    def _sum(self, parts: list[torch.Tensor], lent: list[torch.Tensor]) -> torch.Tensor:
        """In fp32, by ascending rank: parts that were rounded are widened first."""
        total, bulk = parts[0], self.experts.manager.bulk
        if total.dtype is not torch.float32:
            total = self._borrow(torch.float32, lent)
            bulk.unpack(parts[0], [total], add=False)
        for part in parts[1:]:
            if part.dtype is torch.float32:
                total.add_(part)
            else:
                bulk.unpack(part, [total], add=True)
        return total

    def _parts(self, expert: int, flat: torch.Tensor) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
        return _parts(self.experts, expert, flat)


@dataclass
class _Visit:
    """One call: the plan's batches, which rows belong to each, and graphs of those that this rank has rows for."""

    pages: TravellingPages
    batches: list[Batch]
    rows: list[tuple[int, int]]
    counts: list[list[int]]
    graphs: list[tuple[torch.Tensor, ...] | None] = field(default_factory=list)

    @classmethod
    def of(cls, pages: TravellingPages, counts: Sequence[int], plan: Plan) -> _Visit:
        count_of = {move.expert: count for move, count in zip(plan.moves, counts, strict=True)}
        batches, rows, of_batch, start = [], [], [], 0
        for batch in plan.batches():
            mine = [count_of[move.expert] for move in batch]
            batches.append(batch)
            rows.append((start, start + sum(mine)))
            of_batch.append(mine + [0] * (PAGE_BATCH - len(mine)))
            start += sum(mine)
        return cls(pages, batches, rows, of_batch)

    def start(self, number: int) -> Travelling | None:
        """Puts the weights of a batch on their way, if there is one and this rank has a share in it."""
        batch = self.batches[number] if number < len(self.batches) else ()
        return self.pages.start_weights(batch) if any(m.involves(self.pages.channel.rank) for m in batch) else None


class _Travel(torch.autograd.Function):
    """``(x [G, h], probs [G], anchor) -> y [G, h]``; each batch's part of the graph is kept and run in the backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx,
        x_Gh: torch.Tensor,
        probs_G: torch.Tensor,
        anchor: torch.Tensor,
        visit: _Visit,
        keep: bool,
    ) -> torch.Tensor:
        pages, y_Gh = visit.pages, torch.empty_like(x_Gh)
        pages.announce(visit, forward_phase(keep, pages.experts.manager.schedule))
        coming = visit.start(0)
        for number, batch in enumerate(visit.batches):
            visit.graphs.append(None)
            here, rows = coming, slice(*visit.rows[number])
            guests = None if here is None else pages.welcome(batch, here)
            coming = visit.start(number + 1)
            if guests is None:
                continue
            if rows.stop > rows.start:
                with torch.set_grad_enabled(keep):
                    x_nh = x_Gh[rows].detach().requires_grad_(keep)
                    probs_n = probs_G[rows].detach().requires_grad_(keep)
                    y_nh = guests(x_nh, visit.counts[number], probs_n)
                y_Gh[rows] = y_nh.detach()
                if keep:
                    visit.graphs[-1] = (x_nh, probs_n, y_nh)
            pages.farewell()
        ctx.visit = visit  # type: ignore[attr-defined]
        return y_Gh

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, gy_Gh: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        visit: _Visit = ctx.visit  # type: ignore[attr-defined]
        pages = visit.pages
        gx_Gh = torch.empty_like(gy_Gh)
        gprobs_G: torch.Tensor | None = None
        train = bool(ctx.needs_input_grad[2])  # type: ignore[attr-defined]
        coming = visit.start(0)
        home: Travelling | None = None
        for number, batch in enumerate(visit.batches):
            here, graph, rows = coming, visit.graphs[number], slice(*visit.rows[number])
            if here is not None:
                pages.welcome(batch, here)
            coming = visit.start(number + 1)
            if here is None:
                continue
            if graph is not None:
                x_nh, probs_n, y_nh = graph
                gx_nh, gprobs_n = torch.autograd.grad(y_nh, (x_nh, probs_n), gy_Gh[rows].contiguous())
                gx_Gh[rows] = gx_nh
                if gprobs_G is None:
                    gprobs_G = gprobs_n.new_zeros(gy_Gh.shape[0])
                gprobs_G[rows] = gprobs_n
                visit.graphs[number] = None
            if home is not None:
                pages.take_home(home)
            home = pages.start_gradients(batch) if train else None
            pages.farewell()
        if home is not None:
            pages.take_home(home)
        needs = ctx.needs_input_grad  # type: ignore[attr-defined]
        anchor_gradient = gy_Gh.new_zeros(()) if needs[2] else None
        if gprobs_G is None and needs[1]:
            gprobs_G = gy_Gh.new_zeros(gy_Gh.shape[0])
        return gx_Gh if needs[0] else None, gprobs_G if needs[1] else None, anchor_gradient, None, None

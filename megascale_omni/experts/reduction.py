"""Gradient pages summed over the copies of an expert: among the ranks that touched a page, and no others.

[Note: reduction of pages]
Every rank tells which pages it touched, a bit each. Each touched page has one *reducer*: the rank that keeps its
optimizer state where that is sharded by page, else one of those that touched it, in turn. The others that touched it
send theirs; the reducer adds them in fp32, by ascending rank, and rounds once. Sharded, that is all: no other rank
needs the sum, and their own parts are dropped. Where every rank steps its own copy, the reducer sends the sum to all
others. With ``bf16`` on the wire what is sent is rounded to bf16, parts and sums, and what a reducer keeps is rounded
as what it sends, so that copies stay equal; parts are accumulated in fp32 before, and added in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megascale_omni.bulk import TORCH, Bulk
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.shards import PageName, PageShards, buckets
from megascale_omni.groups.channel import Channel, Transfer
from megascale_omni.paging.planes import Plane

Read = Callable[[list[PageName], dict[PageName, torch.Tensor]], None]
"""Fills the tensors with this rank's scaled gradients of the named pages."""


@dataclass(frozen=True)
class PageReduction:
    """A touched page: the ranks that have a gradient of it, ascending, and the one that adds them up."""

    name: PageName
    members: tuple[int, ...]
    reducer: int


def plan_reductions(touched_RP: np.ndarray, *, num_slices: int, owners_P: np.ndarray | None) -> list[PageReduction]:
    """The reductions of one module's pages, ascending.

    ``touched_RP[r, p]``: whether rank ``r`` has a gradient of page ``p``. ``owners_P``: who keeps its optimizer state;
    None: all do.
    """
    plan = []
    for place, page in enumerate(np.nonzero(touched_RP.any(0))[0].tolist()):
        members = tuple(np.nonzero(touched_RP[:, page])[0].tolist())
        reducer = members[place % len(members)] if owners_P is None else int(owners_P[page])
        plan.append(PageReduction(divmod(page, num_slices), members, reducer))
    return plan


def owners_of(shards: PageShards, num_pages: int) -> np.ndarray:
    """``[pages]``: the rank that keeps each page's optimizer state."""
    return np.repeat(np.arange(shards.size), [len(shards.range_of(r, num_pages)) for r in range(shards.size)])


def exchange_touched(modules: Sequence[PagedExperts], channel: Channel) -> list[np.ndarray]:
    """``[ranks, pages]`` of each module: who has a gradient of which page. A collective of the channel's group."""
    if not modules:
        return []
    masks = [e.manager.present(e.pages, Plane.GRADIENT).reshape(-1) for e in modules]
    ends = np.cumsum([len(mask) for mask in masks])
    bits = torch.from_numpy(np.packbits(np.concatenate(masks))).to(modules[0].manager.arena.device)
    gathered = np.unpackbits(channel.all_gather(bits).cpu().numpy(), axis=1, count=int(ends[-1])).astype(bool)
    return np.split(gathered, ends[:-1], axis=1)


class PageReducer:
    """Carries out reductions of one module (see [Note: reduction of pages]).

    Args:
        channel: the expert-data-parallel group. sharded: whether the sum stays with the reducer. wire: dtype on the
        way; None: that of the gradient plane. device: of the pages. bulk: who rounds what is sent.
    """

    def __init__(
        self, channel: Channel, *, sharded: bool, wire: torch.dtype | None, device: torch.device, bulk: Bulk = TORCH
    ) -> None:
        self.channel = channel
        self.device = device
        self.bulk = bulk
        self.sharded = sharded
        self.wire = wire

    def reduce(
        self, experts: PagedExperts, plan: Sequence[PageReduction], read: Read
    ) -> Iterator[tuple[PageName, torch.Tensor | None]]:
        """Every page of the plan with its sum, in the plane's dtype, valid until the next bucket; None: not for us."""
        by_name = {item.name: item for item in plan}

        def numel(name: PageName) -> int:
            return experts.layout.page_numel(name[1])

        for names in buckets(list(by_name), numel):
            yield from self._bucket(experts, [by_name[name] for name in names], numel, read)

    def _bucket(
        self, experts: PagedExperts, run: list[PageReduction], numel: Callable[[PageName], int], read: Read
    ) -> Iterator[tuple[PageName, torch.Tensor | None]]:
        rank, dtype = self.channel.rank, experts.pages.dtypes[Plane.GRADIENT]
        mine = [item for item in run if rank in item.members]
        flat = experts.context.workspace.take("exchange", (sum(numel(item.name) for item in mine),), dtype)
        own = dict(zip((i.name for i in mine), flat.split([numel(i.name) for i in mine]), strict=True) if mine else ())
        read(list(own), own)
        parts = self._swap(
            {q: [own[i.name] for i in mine if i.reducer == q] for q in self._others},
            {p: [numel(i.name) for i in run if i.reducer == rank and p in i.members] for p in self._others},
            dtype,
        )
        sums: dict[PageName, torch.Tensor] = {}
        for item in (item for item in run if item.reducer == rank):
            sums[item.name] = self._sum(item, own.get(item.name), parts, dtype)
        if not self.sharded:
            to_others = [sums[item.name] for item in run if item.reducer == rank]
            wanted = {q: [item for item in run if item.reducer == q] for q in self._others}
            sizes = {q: [numel(item.name) for item in items] for q, items in wanted.items()}
            heard = self._swap(dict.fromkeys(self._others, to_others), sizes, dtype)
            for q, items in wanted.items():
                sums |= {item.name: heard[q].pop(0).to(dtype) for item in items}
        for item in run:
            yield item.name, sums.get(item.name)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.channel.size) if rank != self.channel.rank]

    def _sum(
        self, item: PageReduction, own: torch.Tensor | None, parts: dict[int, list[torch.Tensor]], dtype: torch.dtype
    ) -> torch.Tensor:
        """The parts of all members, taken off the front of ``parts``, added in fp32 by ascending rank."""
        total: torch.Tensor | None = None
        for member in item.members:
            part = own if member == self.channel.rank else parts[member].pop(0)
            assert part is not None
            total = part.to(torch.float32, copy=True) if total is None else total.add_(part)
        assert total is not None
        if self.wire is not None and not self.sharded:
            total = total.to(self.wire)
        return total.to(dtype)

    def _swap(
        self, given: dict[int, list[torch.Tensor]], sizes: dict[int, list[int]], dtype: torch.dtype
    ) -> dict[int, list[torch.Tensor]]:
        """Sends each rank its tensors, one after the other, and receives tensors of ``sizes`` from each."""
        wire = self.wire or dtype
        transfers: list[Transfer] = []
        arriving: dict[int, torch.Tensor] = {}
        packed: dict[tuple[int, ...], torch.Tensor] = {}
        for peer in self._others:
            tensors = given[peer]
            if tensors:
                key = tuple(tensor.data_ptr() for tensor in tensors)  # the same to several ranks is packed once
                if key not in packed:
                    packed[key] = self._packed(tensors, wire)
                transfers.append(Transfer(peer, packed[key], True))
            if sizes[peer]:
                arriving[peer] = torch.empty(sum(sizes[peer]), dtype=wire, device=self.device)
                transfers.append(Transfer(peer, arriving[peer], False))
        self.channel.transfer(transfers).wait()
        return {p: list(arriving[p].split(sizes[p])) if p in arriving else [] for p in self._others}

    def _packed(self, tensors: list[torch.Tensor], wire: torch.dtype) -> torch.Tensor:
        """Tensors one after the other, in the dtype of the wire."""
        if wire is not torch.bfloat16 or tensors[0].dtype is not torch.float32:
            return torch.cat([tensor.to(wire) for tensor in tensors])
        packed = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=wire, device=self.device)
        self.bulk.pack(tensors, packed)
        return packed

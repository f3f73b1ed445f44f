"""Which rank of an expert-data-parallel group keeps a page's optimizer state, and moving pages to others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megascale_omni.experts.module import PagedExperts
from megascale_omni.groups.channel import Channel

BUCKET_ELEMENTS = 1 << 23
"""Elements of one collective: 32 MiB in fp32."""

PageName = tuple[int, int]
"""(expert, slice) of one module."""


@dataclass(frozen=True)
class PageShards:
    """Optimizer state sharded by page: rank ``rank`` of ``size`` owns a contiguous range of each module's pages.

    With ``size`` 1 every page is owned. ``group`` may be None then.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def range_of(self, rank: int, num_pages: int) -> range:
        """The page indices of a module of ``num_pages`` pages that ``rank`` owns; sizes differ by at most one."""
        return range(rank * num_pages // self.size, (rank + 1) * num_pages // self.size)

    def pages_of(self, experts: PagedExperts, rank: int) -> list[PageName]:
        """The pages of a module that ``rank`` owns, ascending."""
        entry = experts.pages.entry
        return [divmod(index, entry.num_slices) for index in self.range_of(rank, entry.num_pages)]

    def owned(self, experts: PagedExperts) -> list[PageName]:
        """The pages of a module that this rank owns, ascending."""
        return self.pages_of(experts, self.rank)


def buckets(names: list[PageName], numel: Callable[[PageName], int]) -> Iterator[list[PageName]]:
    """Cuts pages into runs of at most ``BUCKET_ELEMENTS`` elements (at least one page each)."""
    run: list[PageName] = []
    total = 0
    for name in names:
        if run and total + numel(name) > BUCKET_ELEMENTS:
            yield run
            run, total = [], 0
        run.append(name)
        total += numel(name)
    if run:
        yield run


def broadcast_owned(
    experts: PagedExperts,
    shards: PageShards,
    *,
    dtype: torch.dtype,
    read: Callable[[PageName, torch.Tensor], None],
    write: Callable[[PageName, torch.Tensor], None],
) -> None:
    """Every owner sends its pages (``read`` fills one in), every other rank receives them (``write``). A collective."""
    if shards.size == 1:
        return
    assert shards.group is not None
    layout, channel = experts.layout, Channel(shards.group)

    def numel(name: PageName) -> int:
        return layout.page_numel(name[1])

    for rank in range(shards.size):
        for run in buckets(shards.pages_of(experts, rank), numel):
            flat = experts.context.workspace.take("exchange", (sum(map(numel, run)),), dtype)
            parts = flat.split([numel(name) for name in run])
            if rank == shards.rank:
                for name, part in zip(run, parts, strict=True):
                    read(name, part)
            channel.broadcast(flat, source=rank)
            if rank != shards.rank:
                for name, part in zip(run, parts, strict=True):
                    write(name, part)

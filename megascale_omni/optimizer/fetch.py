"""Updated weight pages read from the ranks that keep their optimizer state, when tokens are about to need them.

[Note: pages on demand]
Where optimizer state is sharded by page, a step leaves the weights current on their owner only. Before a module is
computed, its ranks tell which pages they are about to read and do not have as of the last step, a bit each; owners
bring these up to date and send them. A page that no other rank needs is not sent, and one that nobody needs is not
even stepped: it waits with the steps it has missed (see [Note: deferred steps]). Every rank of the group must ask for
a module at the same place of its program, with or without pages of its own to ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.reduction import owners_of
from megascale_omni.experts.shards import PageName, PageShards, buckets
from megascale_omni.groups.channel import Channel, Transfer
from megascale_omni.paging.planes import Plane


class PageFetcher:
    """Fetches pages of modules whose state is sharded by ``shards``.

    ``stale(experts, name)``: whether this rank's copy of a page is older than the last step.
    ``catch_up(experts, name)`` brings a page that this rank owns up to date. ``fetched(experts, names)`` is told what
    came.
    """

    def __init__(
        self,
        shards: PageShards,
        *,
        stale: Callable[[PagedExperts, PageName], bool],
        catch_up: Callable[[PagedExperts, PageName], None],
        fetched: Callable[[PagedExperts, list[PageName]], None],
    ) -> None:
        self.channel = Channel(shards.group)
        self.pages_received = 0
        self._shards = shards
        self._stale, self._catch_up, self._fetched = stale, catch_up, fetched

    def fetch(self, experts: PagedExperts, wanted: Sequence[PageName]) -> None:
        """Makes ``wanted`` pages of a module current here. A collective of the shards' group."""
        entry, rank = experts.pages.entry, self.channel.rank
        owner_P = owners_of(self._shards, entry.num_pages)
        asked = np.zeros(entry.num_pages, dtype=bool)
        for name in wanted:
            page = name[0] * entry.num_slices + name[1]
            asked[page] = owner_P[page] != rank and self._stale(experts, name)
        bits = torch.from_numpy(np.packbits(asked)).to(experts.manager.arena.device)
        told = self.channel.all_gather(bits).cpu().numpy()
        asked_RP = np.unpackbits(told, axis=1, count=entry.num_pages).astype(bool)
        names = [divmod(page, entry.num_slices) for page in np.nonzero(asked_RP.any(0))[0].tolist()]
        for run in buckets(names, lambda name: experts.layout.page_numel(name[1])):
            self._exchange(experts, run, owner_P, asked_RP)

    def _exchange(self, experts: PagedExperts, run: list[PageName], owner_P: np.ndarray, asked_RP: np.ndarray) -> None:
        rank, slices = self.channel.rank, experts.pages.entry.num_slices
        dtype, device = experts.pages.dtypes[Plane.WEIGHT], experts.manager.arena.device
        owner = {name: int(owner_P[name[0] * slices + name[1]]) for name in run}
        asking = {name: np.nonzero(asked_RP[:, name[0] * slices + name[1]])[0].tolist() for name in run}
        own: dict[PageName, torch.Tensor] = {}
        for name in (name for name in run if owner[name] == rank):
            self._catch_up(experts, name)
            with experts.lease(Plane.WEIGHT, [name]) as lease:
                own[name] = lease.page(*name).clone()
        transfers: list[Transfer] = []
        arriving: dict[int, tuple[list[PageName], torch.Tensor]] = {}
        for peer in (peer for peer in range(self.channel.size) if peer != rank):
            given = [own[name] for name in own if peer in asking[name]]
            taken = [name for name in run if owner[name] == peer and rank in asking[name]]
            if given:
                transfers.append(Transfer(peer, torch.cat(given), True))
            if taken:
                room = torch.empty(sum(experts.layout.page_numel(s) for _, s in taken), dtype=dtype, device=device)
                arriving[peer] = taken, room
                transfers.append(Transfer(peer, room, False))
        self.channel.transfer(transfers).wait()
        for taken, room in arriving.values():
            sizes = [experts.layout.page_numel(s) for _, s in taken]
            for name, part in zip(taken, room.split(sizes), strict=True):
                with experts.lease(Plane.WEIGHT, [name]) as lease:
                    lease.mark_dirty()
                    lease.page(*name).copy_(part)
            self.pages_received += len(taken)
            self._fetched(experts, taken)

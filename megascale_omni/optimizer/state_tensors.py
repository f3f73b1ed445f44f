"""Weights and optimizer state of paged experts as whole tensors, wherever their pages lie and whoever owns them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from megascale_omni.checkpoint.scratch import MakeTensors, in_memory
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.shards import PageName, broadcast_owned
from megascale_omni.optimizer.state_sweeps import MOMENTS
from megascale_omni.paging.planes import Plane
from megascale_omni.schedule import Phase

if TYPE_CHECKING:
    from megascale_omni.optimizer.paged_adam import PagedAdam


def master_plane(experts: PagedExperts) -> Plane:
    """The fp32 plane that the optimizer steps: MASTER where the module has one, its fp32 weights otherwise."""
    return Plane.MASTER if Plane.MASTER in experts.pages.dtypes else Plane.WEIGHT


class StateTensors:
    """What a :class:`PagedAdam` keeps, read and written by those who know tensors only."""

    def __init__(self, adam: PagedAdam) -> None:
        self._adam = adam

    @torch.no_grad()
    def sync_weights(self, experts: PagedExperts) -> None:
        """Sends every owner's weight pages to the other ranks of the group. A collective where state is sharded."""

        def write(name: PageName, part: torch.Tensor) -> None:
            with experts.lease(Plane.WEIGHT, [name]) as lease:
                lease.mark_dirty()
                lease.page(*name).copy_(part)

        self._exchange(experts, Plane.WEIGHT, write)

    def _exchange(self, experts: PagedExperts, plane: Plane, write: Callable[[PageName, torch.Tensor], None]) -> None:
        def read(name: PageName, part: torch.Tensor) -> None:
            if experts.manager.present(experts.pages, plane)[name]:
                with experts.lease(plane, [name]) as lease:
                    part.copy_(lease.page(*name))
            else:
                part.zero_()

        broadcast_owned(experts, self._adam.shards, dtype=experts.pages.dtypes[plane], read=read, write=write)

    @torch.no_grad()
    def squared_parameter_norm(self, experts: PagedExperts) -> float:
        """Sum of squares of a module's fp32 parameters (masters where there are any). A collective where sharded."""
        total = torch.zeros((), dtype=torch.float64)
        for name in self._adam.shards.owned(experts):
            self._adam.catch_up(experts.pages, experts.page_ids(Plane.WEIGHT, [name]))
            with experts.lease(master_plane(experts), [name]) as lease:
                total += torch.linalg.vector_norm(lease.page(*name), dtype=torch.float32).double().square().cpu()
        if self._adam.shards.size > 1:
            total = total.to(experts.manager.arena.device)
            torch.distributed.all_reduce(total, group=self._adam.shards.group)
        return float(total)

    @torch.no_grad()
    def dense(self, experts: PagedExperts, plane: Plane, *, make: MakeTensors | None = None) -> dict[str, torch.Tensor]:
        """A plane's named tensors (copies) of all pages, whoever owns them. A collective where state is sharded."""
        if self._adam.shards.size == 1 or plane is Plane.WEIGHT:
            self._adam.fetch_all(experts)
            return experts.dense(plane, make=make)
        if self._adam.fetcher is not None:
            for name in self._adam.shards.owned(experts):
                self._adam.catch_up_owned(experts, name)
        shapes = {tensor.name: tensor.shape for tensor in experts.names.tensors()}
        tensors = (make or in_memory)(shapes, experts.pages.dtypes[plane])

        def write(name: PageName, part: torch.Tensor) -> None:
            experts.names.gather({name: part}, tensors)

        self._exchange(experts, plane, write)
        for name in self._adam.shards.owned(experts):
            if experts.manager.present(experts.pages, plane)[name]:
                with experts.lease(plane, [name]) as lease:
                    write(name, lease.page(*name))
        return tensors

    @torch.no_grad()
    def load_dense(self, experts: PagedExperts, plane: Plane, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies named tensors into the owned pages of a plane; absent moments are made as zeros first."""
        owned, parts = self._adam.shards.owned(experts), experts.names.of_page
        wanted = [name for name in owned if any(part.tensor.name in tensors for part in parts(*name))]
        zeros = MOMENTS if plane in MOMENTS else ()
        sweep = experts.manager.sweep(experts.pages, wanted, planes=(plane,), phase=Phase.IDLE, write=True, zeros=zeros)
        for name, (page,) in sweep:
            experts.names.scatter(tensors, {name: page})

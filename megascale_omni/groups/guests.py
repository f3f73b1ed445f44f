"""Rooms for experts that visit (see [Note: guests] in pages.py): one for all modules whose experts are alike."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.workspace import Workspace
from megascale_omni.groups.plan import PAGE_BATCH
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.planes import Plane


class GuestHouse:
    """Rooms by what experts are like. Visitors of one module are gone before those of another come."""

    def __init__(self) -> None:
        self._rooms: dict[Hashable, PagedExperts] = {}
        self._buffers: dict[tuple[torch.device, torch.dtype], Workspace] = {}

    def buffers(self, device: torch.device, dtype: torch.dtype) -> Workspace:
        """Lends room for experts on their way (see [Note: buffers of what travels] in pages.py)."""
        return self._buffers.setdefault((device, dtype), Workspace(device))

    @property
    def num_rooms(self) -> int:
        """How many there are: each holds the memory of one batch of visitors."""
        return len(self._rooms)

    def room(self, experts: PagedExperts) -> PagedExperts:
        """The module that computes visitors for ``experts``, which trains if these do."""
        context, dtype = experts.context, experts.pages.dtypes[Plane.WEIGHT]
        key = (experts.layout, dtype, context.activation, id(context.workspace), id(context.backend))
        if key not in self._rooms:
            self._rooms[key] = PagedExperts(
                manager=ExpertManager(device=experts.manager.arena.device, bulk=experts.manager.bulk),
                path="guests",
                layout=experts.layout,
                num_experts=PAGE_BATCH,
                dtypes={Plane.WEIGHT: dtype, Plane.GRADIENT: torch.float32},
                activation=context.activation,
                style="sequential",
                products=context.products,
                workspace=context.workspace,
                backend=context.backend,
                rounds_gradients=False,
            )
        room = self._rooms[key]
        room.requires_grad_(experts.trainable)
        return room

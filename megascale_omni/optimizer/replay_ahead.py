"""Missed steps replayed where only the device knows which experts have tokens, and so which pages are read.

The host lists every page that is behind for all it knows, with the steps that it missed. The device finds how many of
them each page takes: none where its expert has no tokens, and none that it took since the host last heard of it
(``last``, the step of each page as the device knows it). So an expert that is not read stays behind, as ever
[Note: deferred steps], and what is replayed are the same steps in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from megascale_omni.bulk import on_device
from megascale_omni.optimizer.together import Together
from megascale_omni.paging.leases import PagedModule
from megascale_omni.paging.planes import Plane
from megascale_omni.paging.tiers import ABSENT
from megascale_omni.paging.whole import CaughtUp, Coming

if TYPE_CHECKING:
    from megascale_omni.optimizer.paged_adam import PagedAdam


WRITTEN: tuple[Plane, ...] = (Plane.WEIGHT, Plane.MASTER, Plane.MOMENT1, Plane.MOMENT2)


class ReplayAhead:
    """See :class:`megascale_omni.paging.whole.CatchesUpAhead`. Of one optimizer."""

    def __init__(self, adam: PagedAdam) -> None:
        self._adam = adam
        self._last_P: dict[int, torch.Tensor] = {}

    def is_possible(self, module: PagedModule) -> bool:
        """Not where pages take the coming step already, nor where a replay would make moments that there are not."""
        adam = self._adam
        experts = adam.experts_of(module)
        if experts is None:
            return True
        if adam.is_open:
            return False
        ids = experts.manager.ids(module, Plane.WEIGHT, range(module.entry.num_experts))
        if (experts.manager.table.last_step[ids] >= adam.num_steps).all():
            return True
        return adam.arithmetic.decoupled and adam.arithmetic.steps_together(experts.manager.arena.device)

    @torch.no_grad()
    def replay(self, module: PagedModule, coming: Coming, *, known: bool) -> CaughtUp | None:
        """Launches what pages of experts with tokens have missed. ``known``: the host has heard of all calls before."""
        adam, experts = self._adam, self._adam.experts_of(module)
        if experts is None or coming.caught_up_at == adam.num_steps:
            return None
        coming.caught_up_at = adam.num_steps
        manager, entry = experts.manager, module.entry
        ids = manager.ids(module, Plane.WEIGHT, range(entry.num_experts))
        last_steps = manager.table.last_step[ids]
        late = np.nonzero(last_steps < adam.num_steps)[0]
        if not len(late):
            return None
        planes = [plane for plane in WRITTEN if plane in module.dtypes]
        together, owners = Together(experts, adam.arithmetic), list[int]()
        written = list[np.ndarray]()
        for number in late.tolist():
            name = divmod(number, entry.num_slices)
            page_ids = np.concatenate([module.ids(plane, [name]) for plane in planes])
            there = manager.table.tier[page_ids] != ABSENT
            present = zip(planes, page_ids.tolist(), there.tolist(), strict=True)
            pages = {plane: manager.page_tensor(page_id) for plane, page_id, is_there in present if is_there}
            adam.note_page(experts, together, name, pages)
            owners += [number] * (len(together) - len(owners))
            written.append(page_ids[there])
        device, key = manager.arena.device, entry.module
        if known or key not in self._last_P:
            self._last_P[key] = on_device(last_steps.astype(np.int64), device)
        last_P, owner_S = self._last_P[key], on_device(np.asarray(owners, dtype=np.int64), device)
        read_P = (coming.on_device > 0).view(-1, 1).expand(-1, entry.num_slices).reshape(-1)
        due_S = ((adam.num_steps - last_P) * read_P).index_select(0, owner_S)
        manager.before_write(np.concatenate(written))
        together.launch(due=due_S)
        last_P.copy_(torch.where(read_P, adam.num_steps, last_P))
        return CaughtUp(tuple(late.tolist()), tuple(written), adam.num_steps)

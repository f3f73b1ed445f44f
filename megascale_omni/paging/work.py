"""Pages that are worked on together: in the device arena, or where they lie in host memory.

Work that a processor can do as well as the device need not bring pages to the device [Note: where the state lies]. The
planes that *decide* say where it is done: where all their pages lie in host memory, every page of the group that lies
there is worked on there, and the others, which lie on the device or on disk, are leased.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from megascale_omni.paging.planes import NUM_PLANES, Plane
from megascale_omni.paging.table import PageTable
from megascale_omni.paging.tiers import ABSENT, HOST

if TYPE_CHECKING:
    from megascale_omni.paging.manager import ExpertManager

STATE = (Plane.MASTER, Plane.MOMENT1, Plane.MOMENT2)
"""Planes that nothing but the optimizer works on."""


class PageWork:
    """The pages ``page_ids``, one of each plane, held until :meth:`release`. Those of ``deciding`` planes say where."""

    def __init__(self, manager: ExpertManager, page_ids: np.ndarray, *, deciding: tuple[Plane, ...] = ()) -> None:
        self._manager, self._ids = manager, page_ids
        self.lent: dict[int, torch.Tensor] = {}
        if deciding:
            where = page_ids[np.isin(page_ids % NUM_PLANES, deciding)]
            self.lent = manager.pager.host.lend(page_ids, where=where)
        self._leased = page_ids[[page_id not in self.lent for page_id in page_ids.tolist()]] if self.lent else page_ids
        try:
            if len(self._leased):
                manager.hold(self._leased)
        except BaseException:
            manager.pager.host.take_back(self.lent)
            raise

    @property
    def in_host(self) -> bool:
        """Whether the work is to be done in host memory."""
        return bool(self.lent)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The pages' elements, flat, in the order of the ids."""
        return tuple(self._tensor(page_id) for page_id in self._ids.tolist())

    def _tensor(self, page_id: int) -> torch.Tensor:
        whole = self.lent.get(page_id)
        if whole is None:
            return self._manager.page_tensor(page_id)
        key = self._manager.numbering.key(page_id)
        return whole[: self._manager.modules[key.module].layout.page_numel(key.slice)]

    def release(self) -> None:
        """Ends it."""
        self._manager.pager.host.take_back(self.lent)
        if len(self._leased):
            self._manager.release(self._leased)


def wanted_here(
    table: PageTable, page_ids: np.ndarray, *, deciding: tuple[Plane, ...], planes: Sequence[Plane] = STATE
) -> np.ndarray:
    """Of pages that are worked on soon, those to be brought to the device arena, in their order.

    Not those of ``planes`` that lie in host memory and will be worked on there.
    """
    present = table.tier[page_ids] != ABSENT
    if deciding:
        plane = page_ids % NUM_PLANES
        stays = (table.tier[page_ids] == HOST) & np.isin(plane, planes)
        for other in deciding:
            stays &= table.tier[page_ids - plane + int(other)] == HOST
        present &= ~stays
    found: np.ndarray = page_ids[present]
    return found

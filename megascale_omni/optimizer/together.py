"""Pages that are stepped together: collected while a sweep goes over them, then advanced by one launch.

Where an arithmetic has a kernel for tables of pages, and pages stay where they are, a launch a page would cost the host
more time than the device needs for the page. So a sweep writes down what each page has to go through, the steps that it
missed and the one at hand, each page its own, and all of them take them at once. An element's bits depend on its own
page alone, so that nothing else changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.shards import PageName
from megascale_omni.optimizer.arithmetic import AdamArithmetic, AdamSegment
from megascale_omni.optimizer.history import StepRecord
from megascale_omni.paging.planes import Plane


@dataclass
class Together:
    """What pages of one module have to go through. ``clip``: what gradients are multiplied by, None for nothing."""

    experts: PagedExperts
    arithmetic: AdamArithmetic
    clip: float | None = None
    _segments: list[AdamSegment] = field(default_factory=list)
    _clipped: list[torch.Tensor] = field(default_factory=list)
    _steps: dict[PageName, int] = field(default_factory=dict)

    @classmethod
    def of(cls, experts: PagedExperts, arithmetic: AdamArithmetic, *, clip: float | None = None) -> Together | None:
        """Where the pages of a module are collected; None where each is stepped alone.

        Pages that come and go are stepped while they are held: their copies take longer than a launch.
        """
        manager = experts.manager
        if manager.pager.can_evict or not arithmetic.steps_together(manager.arena.device):
            return None
        return cls(experts, arithmetic, clip)

    def __len__(self) -> int:
        """Regions of pages that have been added."""
        return len(self._segments)

    def add(
        self,
        name: PageName,
        pages: Mapping[Plane, torch.Tensor],
        missed: Sequence[tuple[slice, Sequence[StepRecord]]],
        *,
        step: int,
    ) -> None:
        """A page, plane by plane; what each of its regions has missed, up to ``step``. Its gradient is of the last."""
        p, g = pages.get(Plane.MASTER, pages[Plane.WEIGHT]), pages.get(Plane.GRADIENT)
        weight = pages[Plane.WEIGHT] if Plane.MASTER in pages else None
        others = pages.get(Plane.MOMENT1), pages.get(Plane.MOMENT2), g, weight
        for region, records in missed:
            m_r, v_r, g_r, weight_r = (None if tensor is None else tensor[region] for tensor in others)
            self._segments.append(AdamSegment(p[region], m_r, v_r, records, g=g_r, weight=weight_r))
        if g is not None and g.dtype is torch.float32:
            self._clipped.append(g)  # where it is, as stock clips; a narrower one becomes fp32 first
        self._steps[name] = step

    def launch(self, *, stop: torch.Tensor | None = None, due: torch.Tensor | None = None) -> None:
        """All pages take their steps, unless the device finds ``stop`` (int32 ``[1]``) not to be 0.

        ``due`` int64 ``[regions]``: how many steps each region takes, the last ones. The page table is not told: only
        the device knows.
        """
        if self._clipped and self.clip is not None:
            self.experts.manager.bulk.scale([self._clipped], [self.clip])
        if self._segments:
            clip = None if self._clipped else self.clip
            self.arithmetic.advance_all(self._segments, clip=clip, stop=stop, due=due)
        if self._segments and due is None:
            ids = self.experts.page_ids(Plane.WEIGHT, list(self._steps))
            self.experts.manager.table.last_step[ids] = list(self._steps.values())
        self._segments, self._clipped, self._steps = [], [], {}

"""The optimizer's pages, one after the other, each stepped where its state lies [Note: where the state lies]."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from megascale_omni.experts.completion import leased
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.shards import PageName
from megascale_omni.optimizer.host_steps import HostSteps, Pages
from megascale_omni.paging.copies import StreamCopier
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.planes import Plane
from megascale_omni.paging.tiers import ABSENT
from megascale_omni.paging.work import PageWork
from megascale_omni.schedule import Phase

MOMENTS = (Plane.MOMENT1, Plane.MOMENT2)

PageStep = Callable[[PageName, Pages], None]
"""Changes the tensors of a page, which lie in one memory."""


class StateSweeps:
    """Sweeps pages of the optimizer's planes. ``in_host``: those whose moments lie in host memory are stepped there."""

    def __init__(self, *, in_host: bool) -> None:
        self.deciding = MOMENTS if in_host else ()
        self._host: dict[ExpertManager, HostSteps] = {}
        self._done: list[PageName] = []

    def prepare(self, manager: ExpertManager) -> None:
        """The manager leaves in host memory what is stepped there."""
        manager.work_in_host(self.deciding)
        copier = manager.pager.tiers.copier
        self._host[manager] = HostSteps(copier if isinstance(copier, StreamCopier) else None)

    def each(self, experts: PagedExperts, names: Sequence[PageName], step: PageStep, *, also: Sequence[Plane]) -> None:
        """Steps pages with weights, masters and the planes ``also``; absent moments among these are made as zeros.

        Gradients among them are dropped when they have been used.
        """
        planes = [Plane.WEIGHT, *also]
        planes += [Plane.MASTER] if Plane.MASTER in experts.pages.dtypes else []
        manager, host = experts.manager, self._host[experts.manager]
        self._done = []
        # At once: room for the next page would be made by writing a gradient that nobody wants any more.
        released = partial(self._forget_used, experts) if Plane.GRADIENT in also else None
        sweep = manager.sweep(
            experts.pages,
            names,
            planes=planes,
            phase=Phase.STEP,
            write=True,
            zeros=MOMENTS,
            deciding=self.deciding,
            released=released,
        )
        try:
            for name, tensors in sweep:
                pages = dict(zip(planes, tensors, strict=True))
                if self._here(experts, name, pages):
                    hold = PageWork(manager, _ids(experts, name, pages), deciding=self.deciding) if host.waits else None
                    self._in_host(experts, name, pages, step, hold)
                else:
                    step(name, pages)
                    self._done.append(name)
            host.finish()
        except BaseException:
            host.give_up()
            raise
        if Plane.GRADIENT in also:
            self._forget_used(experts)

    def one(self, experts: PagedExperts, name: PageName, step: PageStep, *, planes: Sequence[Plane]) -> None:
        """Steps one page; moments that do not exist yet are made as zeros."""
        with leased(experts, name, planes, deciding=self.deciding) as pages:
            self.at_once(experts, name, pages, step)

    def at_once(
        self,
        experts: PagedExperts,
        name: PageName,
        pages: Mapping[Plane, torch.Tensor],
        step: PageStep,
        *,
        on_device: PageStep | None = None,
        stop: torch.Tensor | None = None,
    ) -> bool:
        """Steps a page that the caller holds, and keeps until this returns. Whether it did.

        Not in host memory, where its gradient is waited for anyway, if ``stop`` is not 0; ``on_device`` sees to that.
        """
        if not self._here(experts, name, pages):
            (on_device or step)(name, dict(pages))
            return True
        if stop is not None and bool(stop.item()):
            return False
        self._in_host(experts, name, pages, step, None)
        self._host[experts.manager].finish()
        return True

    def _in_host(
        self,
        experts: PagedExperts,
        name: PageName,
        pages: Mapping[Plane, torch.Tensor],
        step: PageStep,
        hold: PageWork | None,
    ) -> None:
        def let_go() -> None:
            self._done.append(name)
            if hold is not None:
                hold.release()

        here = self._here(experts, name, pages)
        self._host[experts.manager].step(pages, partial(step, name), here=here, let_go=let_go)
        experts.manager.pager.counts["pages_stepped_in_host"] += 1

    @staticmethod
    def _here(experts: PagedExperts, name: PageName, pages: Mapping[Plane, torch.Tensor]) -> list[Plane]:
        """Planes of a page that are worked on in host memory."""
        lent = experts.manager.pager.host.is_lent
        return [p for p, i in zip(pages, _ids(experts, name, pages).tolist(), strict=True) if lent(i)]

    def _forget_used(self, experts: PagedExperts) -> None:
        done, self._done = self._done, []
        forget_gradients(experts, done)


def _ids(experts: PagedExperts, name: PageName, planes: Mapping[Plane, torch.Tensor]) -> np.ndarray:
    return np.concatenate([experts.page_ids(plane, [name]) for plane in planes])


def forget_gradients(experts: PagedExperts, names: list[PageName]) -> None:
    """Gradients that have been used: where pages leave the device they would be written to disk for nothing."""
    if experts.manager.pager.can_evict and names:
        ids = experts.page_ids(Plane.GRADIENT, names)
        experts.manager.drop(ids[experts.manager.table.tier[ids] != ABSENT])

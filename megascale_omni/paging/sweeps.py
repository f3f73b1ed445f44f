"""Sweeps: groups of pages one after the other, leased while they are worked on, the next ones on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from megascale_omni.paging.batches import RESIDENT_BATCH_BYTES, Batch, cut_batches
from megascale_omni.paging.leases import Lease, PagedModule, Wave
from megascale_omni.paging.planes import Plane
from megascale_omni.paging.visits import SWEEP_AHEAD, Visits
from megascale_omni.paging.work import STATE, PageWork
from megascale_omni.schedule import Phase

if TYPE_CHECKING:
    from megascale_omni.paging.manager import ExpertManager


_NONE = np.zeros(0, dtype=np.int64)


class Sweeps:
    """The sweeps over one manager's pages."""

    def __init__(self, manager: ExpertManager) -> None:
        self._manager = manager
        self.visits = Visits(manager)

    def waves(
        self,
        module: PagedModule,
        experts: Sequence[int],
        *,
        planes: Sequence[Plane],
        phase: Phase,
        create: Plane | None,
        soon: Sequence[Plane],
    ) -> Iterator[Wave]:
        """See :meth:`megascale_omni.paging.manager.ExpertManager.waves`."""
        manager = self._manager
        if manager.whole.unsettled:
            manager.whole.settle()
        resident = manager.arena.device.type == "cuda" and not manager.pager.can_evict
        nbytes = RESIDENT_BATCH_BYTES if resident else None
        batches = cut_batches(module.layout, dtype=module.dtypes[Plane.WEIGHT], experts=experts, nbytes=nbytes)
        slices = module.entry.num_slices
        pages = (np.asarray(experts, dtype=np.int64)[:, None] * slices + np.arange(slices)).reshape(-1)
        self.visits.begin(module, phase, (*planes, *soon), pages)
        ids = {p: [module.ids(p, batch) for batch in batches] for p in planes}
        groups = [np.concatenate([ids[p][number] for p in planes]) for number in range(len(batches))]
        behind = manager.are_behind(module, ids[Plane.WEIGHT]) if Plane.WEIGHT in ids else [_NONE] * len(groups)
        needed = _Needed.of(module, batches, groups, behind=behind, soon=soon)
        for number in range(len(batches)):
            items = batches[number]
            if len(behind[number]):
                self.visits.ask(module, needed.from_group(number))  # beside weights, what catching up works on
            if Plane.WEIGHT in ids:
                manager.catch_up(module, ids[Plane.WEIGHT][number])
            leases: dict[Plane, Lease] = {}
            new: np.ndarray = groups[number][:0]
            try:
                for plane in planes:
                    if plane is create:
                        new = manager.create_ids(module, plane, ids[plane][number])
                    leases[plane] = manager.lease_ids(module, plane, ids[plane][number])
                self.visits.reached(module, items[-1])
                self.visits.ask(module, needed.after_group(number))
                fresh = frozenset((key.expert, key.slice) for key in map(manager.key, new.tolist()))
                for observer in manager.observers:
                    observer.working(module.entry.module)
                yield Wave(items=items, leases=leases, fresh=fresh)
                for observer in manager.observers:
                    observer.worked(module.entry.module)
                new = new[:0]
            finally:
                for lease in leases.values():
                    lease.release()
                manager.drop(new)

    def pages(
        self,
        module: PagedModule,
        names: Sequence[tuple[int, int]],
        *,
        planes: Sequence[Plane],
        phase: Phase,
        write: bool,
        zeros: Sequence[Plane],
        deciding: tuple[Plane, ...],
        released: Callable[[], None] | None,
    ) -> Iterator[tuple[tuple[int, int], tuple[torch.Tensor, ...]]]:
        """See :meth:`megascale_omni.paging.manager.ExpertManager.sweep`."""
        if not names:
            return
        manager = self._manager
        if manager.whole.unsettled:
            manager.whole.settle()
        pairs = np.asarray(names, dtype=np.int64)
        self.visits.begin(module, phase, planes, pairs[:, 0] * module.entry.num_slices + pairs[:, 1])
        groups = np.stack([module.ids(plane, names) for plane in planes], axis=1)
        for number, (name, group) in enumerate(zip(names, groups, strict=True)):
            for column, plane in enumerate(planes if zeros else ()):
                if plane in zeros:
                    for page_id in manager.create_ids(module, plane, group[column : column + 1]).tolist():
                        manager.page_tensor(page_id).zero_()
            work = PageWork(manager, group, deciding=deciding)
            try:
                if write:  # at once: the caller may never come back
                    manager.mark_dirty(group)
                self.visits.reached(module, name)
                coming = groups[number + 1 : number + 1 + SWEEP_AHEAD].reshape(-1)
                self.visits.ask(module, coming, planes=planes if deciding else STATE)
                yield name, work.tensors()
            finally:
                work.release()
            if released is not None:
                released()


@dataclass(frozen=True)
class _Needed:
    """Pages of a visit in waves, in the order of need; where each group begins, and where what follows its leases."""

    page_ids: np.ndarray
    begins: list[int]
    leased: list[int]

    @classmethod
    def of(
        cls,
        module: PagedModule,
        batches: Sequence[Batch],
        groups: Sequence[np.ndarray],
        *,
        behind: Sequence[np.ndarray],
        soon: Sequence[Plane],
    ) -> _Needed:
        """Of a group come first the weight pages that are ``behind``, each with its state, then its other pages, then
        what the caller leases itself while the group is leased.
        """
        state = np.array([plane for plane in STATE if plane in module.dtypes], dtype=np.int64)
        parts, begins, leased, length = [], [], [], 0
        for batch, group, late in zip(batches, groups, behind, strict=True):
            first = group
            if len(late):
                first_of = late[:, None] - int(Plane.WEIGHT)
                with_state = np.concatenate([late[:, None], first_of + state], axis=1).reshape(-1)
                first = np.concatenate([with_state, group[~np.isin(group, late)]])
            after = module.ids_by_page(soon, batch) if soon else group[:0]
            parts += [first, after]
            begins.append(length)
            leased.append(length + len(first))
            length += len(first) + len(after)
        return cls(np.concatenate(parts) if parts else _NONE, begins, leased)

    def from_group(self, number: int) -> np.ndarray:
        """What is needed from a group on."""
        return self.page_ids[self.begins[number] :]

    def after_group(self, number: int) -> np.ndarray:
        """What is needed once a group is leased."""
        return self.page_ids[self.leased[number] :]

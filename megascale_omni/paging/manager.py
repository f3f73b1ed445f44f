"""ExpertManager: the owner of every page. Modules, the optimizer and checkpoints reach bytes through leases only.

A lease brings its pages to the device arena and pins them. Work over many pages is a *sweep*: groups of pages one after
the other, the next ones on their way while the current one is worked on. Forward and backward sweep batches of a
module's experts (waves), the optimizer and exports sweep page by page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megascale_omni.config import Checksum
from megascale_omni.paging.batches import Batch, batch_pages, cut_batches
from megascale_omni.paging.budget import Budget, ClassNeed, share, smallest_budget
from megascale_omni.paging.copies import Copier, CudaCopier
from megascale_omni.paging.disk import DiskFile
from megascale_omni.paging.forecast import Forecast, Visit
from megascale_omni.paging.integrity import check_integrity
from megascale_omni.paging.layout import PageLayout, PageViews, SlotClass
from megascale_omni.paging.leases import Lease, PagedModule, Wave
from megascale_omni.paging.mover import Mover
from megascale_omni.paging.pager import Pager, Tiers
from megascale_omni.paging.planes import PageKey, PageNumbering, Plane
from megascale_omni.paging.table import PageTable
from megascale_omni.paging.tiers import Arena, TierKind
from megascale_omni.schedule import Phase, Schedule


@dataclass(frozen=True)
class PagingOptions:
    """Where pages may go. Without ``disk_path`` everything stays in the device arena."""

    device_budget: Budget = Budget()  # noqa: RUF009 - frozen
    host_budget: Budget = Budget(nbytes=0)  # noqa: RUF009 - frozen
    disk_path: str | Path | None = None
    checksum: Checksum = "auto"
    prefetch: bool = True


class ExpertManager:
    """Page table, tiers and leases of one process. Modules register through :meth:`add_module`."""

    def __init__(
        self,
        *,
        device: torch.device,
        schedule: Schedule | None = None,
        options: PagingOptions | None = None,
        poison: bool = False,
    ) -> None:
        self.options = options or PagingOptions()
        self.numbering = PageNumbering()
        self.schedule = schedule or Schedule()
        self.table = PageTable(self.numbering)
        self.forecast = Forecast()
        self.arena = Arena(device=device, poison=poison)
        self.pager = Pager(self.table, self._tiers(device), self.forecast)
        self.pager.on_move = self._forget_views
        self.catch_up: Callable[[PagedModule, np.ndarray], None] | None = None
        self.schedule.on_step(self.forecast.end_step)
        self._modules: list[PagedModule] = []
        self._views: dict[int, PageViews] = {}

    def _tiers(self, device: torch.device) -> Tiers:
        paths, cuda = self.options.disk_path, device.type == "cuda"
        disk = None if paths is None else DiskFile(paths, checksum=self.options.checksum)
        host = Arena(device=torch.device("cpu"), kind=TierKind.HOST, pin=cuda)
        copier = CudaCopier(device) if cuda else Copier()
        return Tiers(self.arena, host, disk, None if disk is None else Mover(), copier)

    # -- modules -------------------------------------------------------------------------------------------------------

    def add_module(
        self, *, path: str, layout: PageLayout, num_experts: int, dtypes: Mapping[Plane, torch.dtype]
    ) -> PagedModule:
        """Registers a module. ``dtypes`` names its planes: WEIGHT always, GRADIENT and the others where it trains."""
        entry = self.numbering.register(path=path, num_experts=num_experts, num_slices=layout.num_slices)
        module = PagedModule(entry=entry, layout=layout, dtypes={})
        self._modules.append(module)
        self.table.grow()
        for plane, dtype in dtypes.items():
            self.set_plane_dtype(module, plane, dtype)
        return module

    def set_plane_dtype(self, module: PagedModule, plane: Plane, dtype: torch.dtype) -> None:
        """Gives a module a plane, or a plane another dtype. RuntimeError where pages of it exist in another dtype.

        Raises:
            ValueError: the disk has no room for the plane's pages.
        """
        if module.dtypes.get(plane) is dtype:
            return
        if plane in module.dtypes and self.present(module, plane).any():
            raise RuntimeError(
                f"{self.numbering.path(module.entry.module)}: the {plane.name.lower()} plane has pages in "
                f"{module.dtypes[plane]} and cannot become {dtype}"
            )
        module.dtypes[plane] = dtype
        slot_class = module.slot_class(plane)
        ids = self.ids(module, plane, range(module.entry.num_experts))
        self.table.class_index[ids] = self.table.index_of(slot_class)
        if self.pager.tiers.disk is not None:
            offset = self.pager.tiers.disk.reserve(len(ids) * slot_class.nbytes)
            self.table.disk_offset[ids] = offset + np.arange(len(ids)) * slot_class.nbytes
            self._share_budget()

    @property
    def modules(self) -> tuple[PagedModule, ...]:
        """All modules by id."""
        return tuple(self._modules)

    def ids(self, module: PagedModule, plane: Plane, experts: Sequence[int]) -> np.ndarray:
        """Page ids (int64) of all slices of ``experts`` in ``plane``, ascending by (expert, slice)."""
        return self.numbering.page_ids(module.entry.module, plane, experts)

    # -- budget --------------------------------------------------------------------------------------------------------

    def needs(self) -> dict[SlotClass, ClassNeed]:
        """Pages and floor of every slot class, as far as modules are known.

        The floor is two of the largest groups that are worked on together: a batch in the backward (weights and
        gradients), a page in the optimizer (weights, gradient, moments).
        """
        pages: dict[SlotClass, int] = {}
        floors: dict[SlotClass, int] = {}
        for module in self._modules:
            batch = batch_pages(module.layout, module.dtypes[Plane.WEIGHT])
            together: dict[SlotClass, int] = {}
            single: dict[SlotClass, int] = {}
            for plane in module.dtypes:
                slot_class = module.slot_class(plane)
                pages[slot_class] = pages.get(slot_class, 0) + module.entry.num_pages
                single[slot_class] = single.get(slot_class, 0) + 1
                if plane in (Plane.WEIGHT, Plane.GRADIENT):
                    together[slot_class] = together.get(slot_class, 0) + min(batch, module.entry.num_pages)
            for slot_class, count in single.items():
                floor = 2 * max(count, together.get(slot_class, 0))
                floors[slot_class] = max(floors.get(slot_class, 0), floor)
        return {c: ClassNeed(pages[c], floors[c]) for c in pages}

    def check_budget(self) -> None:
        """To be called when all modules and planes are known.

        Raises:
            ValueError: the device budget is too small; names the number that works.
        """
        if self.pager.tiers.disk is None:
            return
        needs = self.needs()
        total = sum(need.pages * c.nbytes for c, need in needs.items())
        budget, smallest = self.options.device_budget.bytes_of(total), smallest_budget(needs)
        if budget < smallest:
            raise ValueError(
                f"device budget {budget} bytes is too small: the largest group of pages worked on together needs "
                f"{smallest} bytes ({100 * smallest / total:.1f}% of all pages); use --megascale-device-budget "
                f"{smallest} or more, or smaller pages (--megascale-page-size)"
            )

    def _share_budget(self) -> None:
        needs = self.needs()
        for slot_class, slots in share(self.options.device_budget, needs).items():
            self.arena.set_limit(slot_class, slots)
            self.pager.evict_down(slot_class)
        for slot_class, slots in share(self.options.host_budget, needs).items():
            wanted = self.options.host_budget.bytes_of(sum(n.pages * c.nbytes for c, n in needs.items()))
            self.pager.tiers.host.set_limit(slot_class, slots if wanted else 0)

    # -- pages ---------------------------------------------------------------------------------------------------------

    def create(self, module: PagedModule, plane: Plane, experts: Sequence[int]) -> np.ndarray:
        """Gives every absent page of ``experts`` in ``plane`` a slot; contents are undefined. Returns the new ids."""
        return self.create_ids(module, plane, self.ids(module, plane, experts))

    def create_ids(self, module: PagedModule, plane: Plane, page_ids: np.ndarray) -> np.ndarray:
        """The same for page ids of one module and plane.

        A page without contents should not leave: create pages when they are about to be written, and few at a time.
        """
        new: np.ndarray = page_ids[self.table.tier[page_ids] == TierKind.ABSENT]
        for number, page_id in enumerate(new.tolist()):
            self.pager.create(page_id)
            self.table.pin(new[number : number + 1])  # making room for the next must not send this one away
        self.table.unpin(new)
        return new

    def drop(self, page_ids: np.ndarray) -> None:
        """Makes unpinned pages absent, wherever they are; their contents are gone."""
        for page_id in page_ids.tolist():
            self.pager.drop(page_id)

    def present(self, module: PagedModule, plane: Plane) -> np.ndarray:
        """Mask ``[num_experts, num_slices]``: which pages of a plane exist (in any tier)."""
        ids = self.ids(module, plane, range(module.entry.num_experts))
        mask: np.ndarray = self.table.tier[ids] != TierKind.ABSENT
        return mask.reshape(module.entry.num_experts, module.entry.num_slices)

    # -- leases --------------------------------------------------------------------------------------------------------

    def lease(self, module: PagedModule, plane: Plane, experts: Sequence[int]) -> Lease:
        """Brings and pins all pages of ``experts`` in ``plane``; absent ones are a RuntimeError."""
        return self.lease_ids(module, plane, self.ids(module, plane, experts))

    def lease_ids(self, module: PagedModule, plane: Plane, page_ids: np.ndarray) -> Lease:
        """The same for page ids of one module and plane."""
        return Lease(self, module, plane, page_ids)

    def hold(self, page_ids: np.ndarray) -> None:
        """For leases: brings pages to the device arena and pins them."""
        self.pager.ensure(page_ids)
        self.table.pin(page_ids)

    def release(self, page_ids: np.ndarray) -> None:
        """For leases: unpins. On an accelerator copies of these slots wait for the kernels issued so far."""
        copier = self.pager.tiers.copier
        if isinstance(copier, CudaCopier):
            event = torch.cuda.Event()
            event.record()
            for page_id in page_ids.tolist():
                copier.reads[self.pager.tensor(page_id).data_ptr()] = event
        self.table.unpin(page_ids)

    def mark_dirty(self, page_ids: np.ndarray) -> None:
        """For leases: the holder wrote to these pages."""
        self.table.dirty[page_ids] = True

    def waves(
        self,
        module: PagedModule,
        experts: Sequence[int],
        *,
        planes: Sequence[Plane],
        phase: Phase = Phase.FORWARD,
        create: Plane | None = None,
    ) -> Iterator[Wave]:
        """Sweeps the pages of ``experts`` in batches, ascending by (expert, slice); each is leased while current.

        What is computed must not depend on where a wave ends: sums run over (expert, slice) in the order given. Weight
        pages are caught up with the optimizer before they are handed out. Absent pages of plane ``create`` are made.
        """
        batches = cut_batches(module.layout, dtype=module.dtypes[Plane.WEIGHT], experts=experts)
        self._begin_visit(module, phase, experts)
        ids = {p: [self._batch_ids(module, p, batch) for batch in batches] for p in planes}
        for number, items in enumerate(batches):
            if self.catch_up is not None and Plane.WEIGHT in ids:
                self.catch_up(module, ids[Plane.WEIGHT][number])
            self._reached(module, items[-1])
            self._ahead(module, [np.concatenate([ids[p][n] for p in planes]) for n in range(number, len(batches))])
            leases: dict[Plane, Lease] = {}
            fresh: frozenset[tuple[int, int]] = frozenset()
            try:
                for plane in planes:
                    if plane is not create:
                        leases[plane] = self.lease_ids(module, plane, ids[plane][number])
                if create is not None:
                    new = set(self.create_ids(module, create, ids[create][number]).tolist())
                    fresh = frozenset(i for i, p in zip(items, ids[create][number].tolist(), strict=True) if p in new)
                    leases[create] = self.lease_ids(module, create, ids[create][number])
                yield Wave(items=items, leases=leases, fresh=fresh)
            finally:
                for lease in leases.values():
                    lease.release()

    def sweep(
        self,
        module: PagedModule,
        names: Sequence[tuple[int, int]],
        *,
        planes: Sequence[Plane],
        phase: Phase,
        write: bool = False,
        zeros: Sequence[Plane] = (),
    ) -> Iterator[tuple[tuple[int, int], tuple[torch.Tensor, ...]]]:
        """Sweeps pages one by one: (expert, slice) and the page's elements in each of ``planes``.

        They are leased while current; ``write`` says that the caller changes them. Absent pages of the planes ``zeros``
        are made, filled with zeros.
        """
        self._begin_visit(module, phase, None)
        ids = [np.concatenate([self._batch_ids(module, p, (name,)) for p in planes]) for name in names]
        for number, name in enumerate(names):
            self._reached(module, name)
            self._ahead(module, ids[number : number + 17])
            leases: list[Lease] = []
            try:
                for plane in planes:
                    page = self._batch_ids(module, plane, (name,))
                    new = self.create_ids(module, plane, page) if plane in zeros else page[:0]
                    leases.append(self.lease_ids(module, plane, page))
                    if len(new):
                        leases[-1].page(*name).zero_()
                yield name, tuple(lease.page(*name) for lease in leases)
                if write:
                    for lease in leases:
                        lease.mark_dirty()
            finally:
                for lease in leases:
                    lease.release()

    def _begin_visit(self, module: PagedModule, phase: Phase, experts: Sequence[int] | None) -> None:
        if not self.pager.can_evict:
            return
        self.forecast.visit(Visit(phase, module.entry.module))
        self.pager.cursor = (module.entry.module, -1.0)
        if experts is not None:
            self.table.active[self.ids(module, Plane.WEIGHT, range(module.entry.num_experts))] = False
            self.table.active[self.ids(module, Plane.WEIGHT, experts)] = True

    def _reached(self, module: PagedModule, name: tuple[int, int]) -> None:
        if self.pager.can_evict:
            entry = module.entry
            self.pager.cursor = (entry.module, (name[0] * entry.num_slices + name[1]) / entry.num_pages)

    def _ahead(self, module: PagedModule, groups: list[np.ndarray]) -> None:
        """Asks for the groups after the first, and for the start of the next visit, in the order they are needed."""
        if not (self.pager.can_evict and self.options.prefetch):
            return
        room = 2 + min((self.arena.limit(c) or 0) for c in {module.slot_class(p) for p in module.dtypes}) // 2
        wanted: list[int] = []
        for group in groups[1:]:
            if len(wanted) >= room:
                break
            wanted += [p for p in group.tolist() if self.table.tier[p] != TierKind.ABSENT]
        if len(wanted) < room:
            wanted += self._next_visit_pages(room - len(wanted))
        if wanted:
            self.pager.prefetch(wanted)

    def _next_visit_pages(self, count: int) -> list[int]:
        """Pages that the next visit will probably use: those of experts that were active at the module's last visit."""
        for visit in self.forecast.following(1):
            module = self._modules[visit.module]
            ids = self.ids(module, Plane.WEIGHT, range(module.entry.num_experts))
            probable = ids[self.table.active[ids]][:count]
            planes = [Plane.WEIGHT]
            if visit.phase is Phase.STEP:
                planes = [p for p in module.dtypes if p is not Plane.WEIGHT or Plane.MASTER not in module.dtypes]
            found = (probable[:, None] + np.asarray([int(p) for p in planes])).reshape(-1)
            result: list[int] = found[self.table.tier[found] != TierKind.ABSENT][:count].tolist()
            return result
        return []

    def _batch_ids(self, module: PagedModule, plane: Plane, items: Batch) -> np.ndarray:
        pairs = np.asarray(items, dtype=np.int64).reshape(-1, 2)
        ids: np.ndarray = module.entry.first_index + pairs[:, 0] * module.entry.num_slices + pairs[:, 1]
        return ids * len(Plane) + int(plane)

    def page_tensor(self, page_id: int) -> torch.Tensor:
        """The elements of a leased page (flat). For leases; a page that no lease holds may move at any time."""
        key = self.numbering.key(page_id)
        return self.pager.tensor(page_id)[: self._modules[key.module].layout.page_numel(key.slice)]

    def page_views(self, page_id: int) -> PageViews:
        """The operand views of a leased page."""
        views = self._views.get(page_id)
        if views is None:
            key = self.numbering.key(page_id)
            views = self._modules[key.module].layout.views(self.pager.tensor(page_id), key.slice)
            self._views[page_id] = views
        return views

    def _forget_views(self, page_id: int) -> None:
        self._views.pop(page_id, None)

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of pages in the device arena by plane name."""
        result = dict.fromkeys((p.name.lower() for p in Plane), 0)
        for module in self._modules:
            for plane in module.dtypes:
                ids = self.ids(module, plane, range(module.entry.num_experts))
                count = int((self.table.tier[ids] == TierKind.DEVICE).sum())
                result[plane.name.lower()] += count * module.slot_class(plane).nbytes
        return result

    def stats(self) -> dict[str, int]:
        """Counters since the start: pages created, dropped, loaded, evicted; faults; bytes loaded and written."""
        return dict(self.pager.counts)

    def key(self, page_id: int) -> PageKey:
        """A page's name."""
        return self.numbering.key(page_id)

    def check_integrity(self) -> None:
        """Raises RuntimeError, printing the equation, when an invariant of the page table does not hold."""
        check_integrity(self.table, self.pager)

    def close(self) -> None:
        """Ends io threads and removes the scratch file."""
        self.pager.close()

"""ExpertManager: the owner of every page. Modules, the optimizer and checkpoints reach bytes through leases only.

A lease brings its pages to the device arena and pins them. Work over many pages is a *sweep*: groups of pages one after
the other, the next ones on their way while the current one is worked on. Forward and backward sweep batches of a
module's experts (waves), the optimizer and exports sweep page by page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from megascale_omni.bulk import Bulk, bulk_for
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.copies import Copier
from megascale_omni.paging.heap import give_large_blocks_back
from megascale_omni.paging.integrity import check_integrity
from megascale_omni.paging.layout import PageLayout, PageViews
from megascale_omni.paging.leases import CatchesUp, Lease, PagedModule, Wave
from megascale_omni.paging.memory import MemoryProbe, probe_for
from megascale_omni.paging.mover import Mover
from megascale_omni.paging.needs import check_budget, class_needs
from megascale_omni.paging.observe import KeepsHeat, Observer
from megascale_omni.paging.options import PagingOptions, tiers_for
from megascale_omni.paging.outlook import Outlook
from megascale_omni.paging.pager import Pager
from megascale_omni.paging.planes import PageKey, PageNumbering, Plane
from megascale_omni.paging.segments import largest_segment
from megascale_omni.paging.shares import Shares
from megascale_omni.paging.sweeps import Sweeps
from megascale_omni.paging.table import PageTable
from megascale_omni.paging.tiers import ABSENT, DEVICE, Arena
from megascale_omni.paging.upkeep import Upkeep
from megascale_omni.paging.whole import CatchesUpAhead, WholeModules
from megascale_omni.schedule import Phase, Schedule


class ExpertManager:
    """Page table, tiers and leases of one process. Modules register through :meth:`add_module`.

    ``mover`` are io threads other than the usual ones, ``copier`` likewise, ``memory`` tells what is free (None: of the
    device), ``bulk`` does what is done to many pages at once (None: chosen by device); ``poison`` is the arena's.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        schedule: Schedule | None = None,
        options: PagingOptions | None = None,
        mover: Mover | None = None,
        copier: Copier | None = None,
        memory: MemoryProbe | None = None,
        bulk: Bulk | None = None,
        poison: bool = False,
    ) -> None:
        self.bulk = bulk or bulk_for(device)
        self.options = options or PagingOptions()
        self.numbering = PageNumbering()
        self.schedule = schedule or Schedule()
        self.table = PageTable(self.numbering)
        self.outlook = Outlook(self.numbering)
        self.arena = Arena(device=device, largest=largest_segment(device), poison=poison)
        tiers = tiers_for(self.options, self.arena, bulk=self.bulk, mover=mover, copier=copier)
        self.pager = Pager(self.table, tiers, self.outlook)
        self.pager.on_move = self._forget_views
        self.schedule.on_step(self.outlook.end_step)
        self.shares = Shares(self)
        self.upkeep = Upkeep(self, self.options.upkeep, probe=memory or probe_for(device))
        self.observers: list[Observer] = []
        self._sweeps = Sweeps(self)
        self.whole = WholeModules(self)
        self.heat: KeepsHeat | None = None
        self._modules: list[PagedModule] = []
        self._views: dict[int, PageViews] = {}
        self._catches_up: dict[int, CatchesUp] = {}
        self.before_write: Callable[[np.ndarray], None] = lambda page_ids: None  # a snapshot that still needs them

    # -- modules -------------------------------------------------------------------------------------------------------

    def add_module(
        self, *, path: str, layout: PageLayout, num_experts: int, dtypes: Mapping[Plane, torch.dtype]
    ) -> PagedModule:
        """Registers a module. ``dtypes`` names its planes: WEIGHT always, GRADIENT and the others where it trains."""
        entry = self.numbering.register(path=path, num_experts=num_experts, num_slices=layout.num_slices)
        module = PagedModule(entry=entry, layout=layout, dtypes={})
        self._modules.append(module)
        self.table.grow()
        for plane in sorted(dtypes):  # weights first: they decide about batches
            self.set_plane_dtype(module, plane, dtypes[plane])
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
            offset = self.pager.tiers.disk.promise(len(ids) * slot_class.nbytes)
            self.table.disk_offset[ids] = offset + np.arange(len(ids)) * slot_class.nbytes
            self.shares.apply()

    @property
    def modules(self) -> tuple[PagedModule, ...]:
        """All modules by id."""
        return tuple(self._modules)

    @property
    def prefetches(self) -> bool:
        """Whether pages are fetched before they are needed."""
        return self.options.prefetch

    def ids(self, module: PagedModule, plane: Plane, experts: Sequence[int]) -> np.ndarray:
        """Page ids (int64) of all slices of ``experts`` in ``plane``, ascending by (expert, slice)."""
        return self.numbering.page_ids(module.entry.module, plane, experts)

    # -- budget --------------------------------------------------------------------------------------------------------

    def check_budget(self) -> None:
        """To be called when all modules and planes are known.

        Raises:
            ValueError: the device budget is too small; names the number that works.
        """
        if self.pager.tiers.disk is not None:
            check_budget(self.options.device_budget, class_needs(self._modules))

    def resize(self, budget: Budget, *, host: Budget | None = None) -> None:
        """Gives pages another device budget while training goes on; memory beyond it returns to the system.

        ``host``: and another host budget behind it (None: as it is). Done at once where no lease is held, else when the
        step has ended; of several requests the last one counts.

        Raises:
            ValueError: the budget is too small (names the number that works), or pages have nowhere to go.
        """
        self.upkeep.resize(budget, host)
        if self.arena.device.type == "cpu" and budget.fraction != 1.0:
            give_large_blocks_back()

    def compact(self) -> int | None:
        """Moves pages together and in order, so that the memory of all segments that they do not need returns to the
        system [Note: compaction]; it comes back as pages do. Done at once where no lease is held: the bytes that
        returned. Else, None, when the step has ended.
        """
        return self.upkeep.compact()

    # -- pages ---------------------------------------------------------------------------------------------------------

    def create(self, module: PagedModule, plane: Plane, experts: Sequence[int]) -> np.ndarray:
        """Gives every absent page of ``experts`` in ``plane`` a slot; contents are undefined. Returns the new ids."""
        return self.create_ids(module, plane, self.ids(module, plane, experts))

    def create_ids(self, module: PagedModule, plane: Plane, page_ids: np.ndarray) -> np.ndarray:
        """The same for page ids of one module and plane. Where there is no room for all, none is made.

        A page without contents should not leave: create pages when they are about to be written, and few at a time.
        """
        if self.whole.unsettled:  # pages may be there that nobody has written to
            self.whole.settle()
        new: np.ndarray = page_ids[self.table.tier[page_ids] == ABSENT]
        made = 0
        try:
            for page_id in new.tolist():
                self.pager.create(page_id)
                self.table.pin(new[made : made + 1])  # making room for the next must not send this one away
                made += 1
        finally:
            if made:
                self.pager.release(new[:made])
            if made < len(new):
                self._drop(new[:made])
        for observer in self.observers if len(new) else ():
            observer.created(new)
        return new

    def drop(self, page_ids: np.ndarray) -> None:
        """Makes unpinned pages absent, wherever they are; their contents are gone."""
        if len(page_ids):
            self.before_write(page_ids)
            self.table.changed[page_ids] = True
        self._drop(page_ids)
        for observer in self.observers if len(page_ids) else ():
            observer.dropped(page_ids)

    def _drop(self, page_ids: np.ndarray) -> None:
        for page_id in page_ids.tolist():
            self.pager.drop(page_id)

    def present(self, module: PagedModule, plane: Plane) -> np.ndarray:
        """Mask ``[num_experts, num_slices]``: which pages of a plane exist (in any tier)."""
        if plane is Plane.GRADIENT and self.whole.unsettled:
            self.whole.settle()
        ids = self.ids(module, plane, range(module.entry.num_experts))
        mask: np.ndarray = self.table.tier[ids] != ABSENT
        return mask.reshape(module.entry.num_experts, module.entry.num_slices)

    # -- catching up ---------------------------------------------------------------------------------------------------

    def set_catch_up(
        self, module: PagedModule, catches_up: CatchesUp | None, *, ahead: CatchesUpAhead | None = None
    ) -> None:
        """Who knows what the module's weight pages have missed: the optimizer that steps them.

        ``ahead`` knows it where the host has not heard which experts have tokens (None: nobody does).
        """
        self._catches_up.pop(module.entry.module, None)
        self.whole.catch_up_by(module, ahead, needed=catches_up is not None)
        if catches_up is not None:
            self._catches_up[module.entry.module] = catches_up

    def catch_up(self, module: PagedModule, page_ids: np.ndarray) -> None:
        """Brings weight pages of a module up to date with its optimizer, before they are read."""
        known = self._catches_up.get(module.entry.module)
        if known is not None:
            known.catch_up(module, page_ids)

    def are_behind(self, module: PagedModule, groups: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Of groups of weight pages those that :meth:`catch_up` would work on."""
        known = self._catches_up.get(module.entry.module)
        if known is None or not self.pager.can_evict:
            return [group[:0] for group in groups]
        return [group[known.is_behind(module, group)] for group in groups]

    def work_in_host(self, deciding: tuple[Plane, ...]) -> None:
        """Pages whose planes ``deciding`` lie in host memory are stepped there: they are not fetched ahead."""
        self._sweeps.visits.in_host = deciding

    # -- leases --------------------------------------------------------------------------------------------------------

    def lease(self, module: PagedModule, plane: Plane, experts: Sequence[int]) -> Lease:
        """Brings and pins all pages of ``experts`` in ``plane``; absent ones are a RuntimeError."""
        return self.lease_ids(module, plane, self.ids(module, plane, experts))

    def lease_ids(self, module: PagedModule, plane: Plane, page_ids: np.ndarray) -> Lease:
        """The same for page ids of one module and plane."""
        return Lease(self, module, plane, page_ids)

    def routed(self, module: PagedModule, counts: Sequence[int]) -> None:
        """A forward of a training step sends ``counts`` tokens to each expert: for those who keep heat."""
        if self.observers:
            tokens = np.asarray(counts, dtype=np.int64)
            for observer in self.observers:
                observer.routed(module.entry.module, tokens)

    def send_away(self, page_ids: np.ndarray) -> None:
        """Lets pages leave the device arena, without waiting; those that leases hold or that are on their way stay."""
        if self.pager.can_evict:
            self.pager.departures.send_away(page_ids)

    def hold(self, page_ids: np.ndarray) -> None:
        """For leases: brings pages to the device arena and pins them."""
        if self.whole.unsettled:
            self.whole.settle()
        if self.pager.can_evict:
            start = time.perf_counter_ns()
            self.pager.ensure(page_ids)
            self.pager.tiers.copier.acquired(map(self.pager.tensor, page_ids.tolist()))
            self.pager.counts["stall_microseconds"] += (time.perf_counter_ns() - start) // 1000
        else:
            self.pager.ensure(page_ids)
        self.table.pin(page_ids)
        for observer in self.observers:
            observer.held(page_ids)

    def release(self, page_ids: np.ndarray) -> None:
        """For leases: unpins. On an accelerator copies of these slots wait for the kernels issued so far."""
        if self.pager.can_evict:
            self.pager.tiers.copier.released(map(self.pager.tensor, page_ids.tolist()))
        self.pager.release(page_ids)
        for observer in self.observers:
            observer.released(page_ids)

    def mark_dirty(self, page_ids: np.ndarray) -> None:
        """For leases: the holder is about to write to these pages, or is writing to them."""
        self.before_write(page_ids)
        self.table.dirty[page_ids] = True
        self.table.changed[page_ids] = True
        for observer in self.observers:
            observer.written(page_ids)

    def waves(
        self,
        module: PagedModule,
        experts: Sequence[int],
        *,
        planes: Sequence[Plane],
        phase: Phase = Phase.FORWARD,
        create: Plane | None = None,
        soon: Sequence[Plane] = (),
    ) -> Iterator[Wave]:
        """Sweeps the pages of ``experts`` in batches, ascending by (expert, slice); each is leased while current.

        What is computed must not depend on where a wave ends: sums run over (expert, slice) in the order given. Weight
        pages are caught up with the optimizer before they are handed out. Absent pages of plane ``create`` are made;
        where the caller does not come back for the next wave they are absent again, being half written. Planes ``soon``
        of a wave's pages are brought meanwhile: the caller leases them itself, page by page.
        """
        return self._sweeps.waves(module, experts, planes=planes, phase=phase, create=create, soon=soon)

    def sweep(
        self,
        module: PagedModule,
        names: Sequence[tuple[int, int]],
        *,
        planes: Sequence[Plane],
        phase: Phase,
        write: bool = False,
        zeros: Sequence[Plane] = (),
        deciding: tuple[Plane, ...] = (),
        released: Callable[[], None] | None = None,
    ) -> Iterator[tuple[tuple[int, int], tuple[torch.Tensor, ...]]]:
        """Sweeps pages one by one: (expert, slice) and the page's elements in each of ``planes``.

        They are leased while current; ``write`` says that the caller changes them. Absent pages of the planes ``zeros``
        are made, filled with zeros. Where all pages of the planes ``deciding`` lie in host memory, those that lie there
        are handed out as they are, see :class:`megascale_omni.paging.work.PageWork`. ``released`` is called whenever a
        page has been let go of, before the next one is brought.
        """
        return self._sweeps.pages(
            module,
            names,
            planes=planes,
            phase=phase,
            write=write,
            zeros=zeros,
            deciding=deciding,
            released=released,
        )

    def page_tensor(self, page_id: int) -> torch.Tensor:
        """The elements of a leased page (flat). For leases; a page that no lease holds may move at any time."""
        key = self.numbering.key(page_id)
        return self.pager.tensor(page_id)[: self._modules[key.module].layout.page_numel(key.slice)]

    def page_copy(self, page_id: int) -> torch.Tensor:
        """A copy of a page's elements, wherever the page is; see :func:`megascale_omni.paging.readers.copy_of`."""
        key = self.numbering.key(page_id)
        return self.pager.copy(page_id)[: self._modules[key.module].layout.page_numel(key.slice)]

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
                count = int((self.table.tier[ids] == DEVICE).sum())
                result[plane.name.lower()] += count * module.slot_class(plane).nbytes
        return result

    def stats(self) -> dict[str, int]:
        """Counters since the start: pages created, dropped, loaded, evicted; faults; bytes loaded and written; where
        pages can leave, bytes that LRU would have loaded.
        """
        counts = dict(self.pager.counts)
        return {**counts, "bytes_loaded_by_lru": self.pager.shadows.page_in_bytes()} if self.pager.can_evict else counts

    def key(self, page_id: int) -> PageKey:
        """A page's name."""
        return self.numbering.key(page_id)

    def check_integrity(self) -> None:
        """Raises RuntimeError, printing the equation, when an invariant of the page table does not hold."""
        check_integrity(self.table, self.pager)

    def close(self) -> None:
        """Ends io threads and removes the scratch file."""
        self.pager.close()

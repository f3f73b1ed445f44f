"""ExpertManager: the owner of every page. Modules, the optimizer and checkpoints reach bytes through leases only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch

from megascale_omni.paging.layout import MIB, PageLayout, PageViews, SlotClass
from megascale_omni.paging.planes import ModuleEntry, PageKey, PageNumbering, Plane
from megascale_omni.paging.table import PageTable
from megascale_omni.paging.tiers import DeviceArena, TierKind
from megascale_omni.schedule import Schedule

Batch = tuple[tuple[int, int], ...]
"""Consecutive pages (expert, slice) of one width that are worked on together."""

BATCH_BYTES = 2 * MIB
"""Weight bytes of a batch, unless a single page is larger. The smallest wave is one batch."""


def cut_batches(layout: PageLayout, *, dtype: torch.dtype, experts: Sequence[int]) -> tuple[Batch, ...]:
    """Cuts the pages of ``experts`` (ascending) into batches.

    The cut depends on layout, dtype and experts alone, so that it is the same whatever is resident. A batch has pages
    of one width; a short last slice is a batch of its own.
    """
    limit = max(1, BATCH_BYTES // layout.slot_class(dtype).nbytes)
    batches: list[Batch] = []
    current: list[tuple[int, int]] = []
    for expert in experts:
        for slice_ in range(layout.num_slices):
            ends = current and layout.rows_of(slice_) != layout.rows_of(current[-1][1])
            if ends or len(current) == limit:
                batches.append(tuple(current))
                current = []
            current.append((expert, slice_))
    if current:
        batches.append(tuple(current))
    return tuple(batches)


@dataclass(frozen=True)
class PagedModule:
    """What the manager knows about a module: its entry, layout and the dtype of each plane that it has."""

    entry: ModuleEntry
    layout: PageLayout
    dtypes: dict[Plane, torch.dtype]

    def slot_class(self, plane: Plane) -> SlotClass:
        """Slot class of this module's pages in ``plane``."""
        return self.layout.slot_class(self.dtypes[plane])


class Lease:
    """Pinned pages of one module and plane. While it lives, none of them moves; use as a context manager.

    ``reader_event`` and ``writer_event`` are for an accelerator's streams: the last kernel that reads the pages and the
    last one that writes them, after both of which a slot may be reused. Nothing records them yet and both stay None:
    all work on pages is issued to one stream, in order.
    """

    __slots__ = ("_held", "_ids", "_manager", "module", "plane", "reader_event", "writer_event")

    def __init__(self, manager: ExpertManager, module: PagedModule, plane: Plane, ids: np.ndarray) -> None:
        self._manager = manager
        self._ids = ids
        self.module = module
        self.plane = plane
        self.reader_event: torch.cuda.Event | None = None
        self.writer_event: torch.cuda.Event | None = None
        manager.table.pin(ids)
        self._held = frozenset(ids.tolist())

    def page(self, expert: int, slice_: int) -> torch.Tensor:
        """The page's elements, flat, without the slot's unused tail."""
        return self._manager.page_tensor(self._page_id(expert, slice_))

    def views(self, expert: int, slice_: int) -> PageViews:
        """The operands of the products as views of the page."""
        return self._manager.page_views(self._page_id(expert, slice_))

    def _page_id(self, expert: int, slice_: int) -> int:
        entry = self.module.entry
        page_id = (entry.first_index + expert * entry.num_slices + slice_) * len(Plane) + int(self.plane)
        if page_id not in self._held:
            raise RuntimeError(f"{self._manager.numbering.describe(page_id)} is used without a lease")
        return page_id

    def mark_dirty(self) -> None:
        """The holder wrote to every page of the lease."""
        self._manager.table.dirty[self._ids] = True

    def release(self) -> None:
        """Ends the lease; idempotent."""
        if self._held:
            self._manager.table.unpin(self._ids)
            self._held = frozenset()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


@dataclass(frozen=True)
class Wave:
    """Pages of one module that are resident together: batches of (expert, slice), ascending, and their leases."""

    batches: tuple[Batch, ...]
    leases: Mapping[Plane, Lease]


class ExpertManager:
    """Page table, arenas and leases of one process.

    Modules register through :meth:`add_module`; their pages are absent until :meth:`create`.
    """

    def __init__(self, *, device: torch.device, schedule: Schedule | None = None, poison: bool = False) -> None:
        self.numbering = PageNumbering()
        self.schedule = schedule or Schedule()
        self.arena = DeviceArena(device=device, poison=poison)
        self._modules: list[PagedModule] = []
        self.table = PageTable(self.numbering)
        self._tensors: dict[int, torch.Tensor] = {}
        self._views: dict[int, PageViews] = {}
        self._counts: Counter[str] = Counter()

    # -- modules -----------------------------------------------------------------------------------------------------

    def add_module(
        self, *, path: str, layout: PageLayout, num_experts: int, dtypes: Mapping[Plane, torch.dtype]
    ) -> PagedModule:
        """Registers a module. ``dtypes`` names its planes: WEIGHT always, GRADIENT and the others where it trains."""
        entry = self.numbering.register(path=path, num_experts=num_experts, num_slices=layout.num_slices)
        module = PagedModule(entry=entry, layout=layout, dtypes=dict(dtypes))
        self._modules.append(module)
        self.table.grow()
        return module

    def set_plane_dtype(self, module: PagedModule, plane: Plane, dtype: torch.dtype) -> None:
        """Gives a module a plane, or a plane another dtype. RuntimeError where pages of it exist in another dtype."""
        if module.dtypes.get(plane, dtype) is not dtype and self.present(module, plane).any():
            raise RuntimeError(
                f"{self.numbering.path(module.entry.module)}: the {plane.name.lower()} plane has pages in "
                f"{module.dtypes[plane]} and cannot become {dtype}"
            )
        module.dtypes[plane] = dtype

    @property
    def modules(self) -> tuple[PagedModule, ...]:
        """All modules by id."""
        return tuple(self._modules)

    def ids(self, module: PagedModule, plane: Plane, experts: Sequence[int]) -> np.ndarray:
        """Page ids (int64) of all slices of ``experts`` in ``plane``, ascending by (expert, slice)."""
        return self.numbering.page_ids(module.entry.module, plane, experts)

    # -- pages -------------------------------------------------------------------------------------------------------

    def create(self, module: PagedModule, plane: Plane, experts: Sequence[int]) -> np.ndarray:
        """Gives every absent page of ``experts`` in ``plane`` a slot; contents are undefined. Returns the new ids."""
        return self.create_ids(module, plane, self.ids(module, plane, experts))

    def create_ids(self, module: PagedModule, plane: Plane, page_ids: np.ndarray) -> np.ndarray:
        """The same for page ids of one module and plane."""
        new: np.ndarray = page_ids[self.table.tier[page_ids] == TierKind.ABSENT]
        slot_class = module.slot_class(plane)
        for page_id in new.tolist():
            slot = self.arena.allocate(slot_class)
            self.table.place(page_id, tier=TierKind.DEVICE, slot=slot)
            self._remember(page_id, module, slot_class, slot)
        self._counts["pages_created"] += len(new)
        return new

    def reserve(self, module: PagedModule, plane: Plane, pages: int | None = None) -> None:
        """Makes one segment for all pages of a plane that will all exist, so that they lie together."""
        self.arena.reserve(module.slot_class(plane), module.entry.num_pages if pages is None else pages)

    def drop(self, page_ids: np.ndarray) -> None:
        """Makes unpinned pages absent; their contents are gone."""
        for page_id in page_ids.tolist():
            key = self.numbering.key(page_id)
            slot = self.table.remove(page_id)
            self.arena.free(self._modules[key.module].slot_class(key.plane), slot)
            self._tensors.pop(page_id, None)
            self._views.pop(page_id, None)
        self._counts["pages_dropped"] += len(page_ids)

    def present(self, module: PagedModule, plane: Plane) -> np.ndarray:
        """Mask ``[num_experts, num_slices]``: which pages of a plane exist."""
        ids = self.ids(module, plane, range(module.entry.num_experts))
        mask: np.ndarray = self.table.tier[ids] != TierKind.ABSENT
        return mask.reshape(module.entry.num_experts, module.entry.num_slices)

    # -- leases ------------------------------------------------------------------------------------------------------

    def lease(self, module: PagedModule, plane: Plane, experts: Sequence[int]) -> Lease:
        """Pins all pages of ``experts`` in ``plane``; absent ones are a RuntimeError."""
        return self.lease_ids(module, plane, self.ids(module, plane, experts))

    def lease_ids(self, module: PagedModule, plane: Plane, page_ids: np.ndarray) -> Lease:
        """The same for page ids of one module and plane."""
        return Lease(self, module, plane, page_ids)

    def waves(self, module: PagedModule, experts: Sequence[int], *, planes: Sequence[Plane]) -> Iterator[Wave]:
        """Yields the pages of ``experts`` in waves, ascending by (expert, slice); each is leased while current.

        What is computed must not depend on where a wave ends: sums run over (expert, slice) in the order given.
        """
        if not len(experts):
            return
        batches = cut_batches(module.layout, dtype=module.dtypes[Plane.WEIGHT], experts=experts)
        with ExitStack() as stack:
            leases = {plane: stack.enter_context(self.lease(module, plane, experts)) for plane in planes}
            yield Wave(batches=batches, leases=leases)

    def page_tensor(self, page_id: int) -> torch.Tensor:
        """The elements of a leased page (flat). For leases; a page that no lease holds may move at any time."""
        return self._tensors[page_id]

    def page_views(self, page_id: int) -> PageViews:
        """The operand views of a leased page."""
        views = self._views.get(page_id)
        if views is None:
            key = self.numbering.key(page_id)
            views = self._modules[key.module].layout.views(self._tensors[page_id], key.slice)
            self._views[page_id] = views
        return views

    def _remember(self, page_id: int, module: PagedModule, slot_class: SlotClass, slot: int) -> None:
        slice_ = (page_id // len(Plane) - module.entry.first_index) % module.entry.num_slices
        self._tensors[page_id] = self.arena.tensor(slot_class, slot)[: module.layout.page_numel(slice_)]

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of ACTIVE pages by plane name."""
        result = dict.fromkeys((p.name.lower() for p in Plane), 0)
        for module in self._modules:
            for plane in module.dtypes:
                count = int(self.present(module, plane).sum())
                result[plane.name.lower()] += count * module.slot_class(plane).nbytes
        return result

    def stats(self) -> dict[str, int]:
        """Counters since the start: pages created and dropped."""
        return dict(self._counts)

    def key(self, page_id: int) -> PageKey:
        """A page's name."""
        return self.numbering.key(page_id)

    def check_integrity(self) -> None:
        """Raises RuntimeError, printing the equation, when an invariant of the page table does not hold."""
        self.arena.check_integrity()
        table = self.table
        owners: dict[tuple[SlotClass, int], int] = {}
        for page_id in np.nonzero(table.tier == TierKind.DEVICE)[0].tolist():
            key = self.numbering.key(page_id)
            place = (self._modules[key.module].slot_class(key.plane), int(table.slot[page_id]))
            if place in owners:
                names = f"{self.numbering.describe(owners[place])} and {self.numbering.describe(page_id)}"
                raise RuntimeError(f"slot {place[1]} of {place[0]} has two owners: {names}")
            owners[place] = page_id
        for slot_class in self.arena.slot_classes():
            owned = sorted(slot for c, slot in owners if c == slot_class)
            if owned != self.arena.taken_slots(slot_class):
                raise RuntimeError(
                    f"{slot_class}: slots owned by pages = slots taken does not hold: "
                    f"{len(owned)} != {len(self.arena.taken_slots(slot_class))}"
                )
        pinned_away = np.nonzero((table.pins > 0) & (table.tier != TierKind.DEVICE))[0]
        if len(pinned_away):
            raise RuntimeError(f"{self.numbering.describe(int(pinned_away[0]))} is pinned but not ACTIVE")
        if (table.pins < 0).any():
            raise RuntimeError("a page has a negative pin count")

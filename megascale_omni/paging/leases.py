"""Leases: how pages are reached. While a lease lives its pages are in the device arena and do not move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy as np
import torch

from megascale_omni.paging.batches import Batch
from megascale_omni.paging.layout import PageLayout, PageViews, SlotClass
from megascale_omni.paging.planes import NUM_PLANES, ModuleEntry, PageNumbering, Plane


class PageOwner(Protocol):
    """What a lease needs of the manager."""

    numbering: PageNumbering

    def hold(self, page_ids: np.ndarray) -> None:
        """Brings pages to the device arena and pins them."""
        ...

    def release(self, page_ids: np.ndarray) -> None:
        """Unpins them."""
        ...

    def mark_dirty(self, page_ids: np.ndarray) -> None:
        """Their holder is about to write to them."""
        ...

    def page_tensor(self, page_id: int) -> torch.Tensor:
        """A held page's elements."""
        ...

    def page_views(self, page_id: int) -> PageViews:
        """A held page's operands."""
        ...


@dataclass(frozen=True)
class PagedModule:
    """What the manager knows about a module: its entry, layout and the dtype of each plane that it has."""

    entry: ModuleEntry
    layout: PageLayout
    dtypes: dict[Plane, torch.dtype]

    def slot_class(self, plane: Plane) -> SlotClass:
        """Slot class of this module's pages in ``plane``."""
        return self.layout.slot_class(self.dtypes[plane])

    @property
    def slot_classes(self) -> frozenset[SlotClass]:
        """Slot classes of all its planes."""
        return frozenset(self.layout.slot_class(dtype) for dtype in set(self.dtypes.values()))

    def ids(self, plane: Plane, items: Sequence[tuple[int, int]]) -> np.ndarray:
        """Page ids (int64) of pages (expert, slice) in ``plane``, in the order given."""
        pairs = np.asarray(items, dtype=np.int64).reshape(-1, 2)
        found: np.ndarray = self.entry.first_index + pairs[:, 0] * self.entry.num_slices + pairs[:, 1]
        return found * NUM_PLANES + int(plane)

    def ids_by_page(self, planes: Sequence[Plane], items: Sequence[tuple[int, int]]) -> np.ndarray:
        """Page ids of pages in several planes: page after page, in the order in which they are asked for."""
        found: np.ndarray = np.stack([self.ids(plane, items) for plane in planes], axis=1).reshape(-1)
        return found


class CatchesUp(Protocol):
    """Who knows what weight pages (ids) have missed: the optimizer that steps them."""

    def catch_up(self, module: PagedModule, page_ids: np.ndarray) -> None:
        """Brings weight pages of a module up to date; called before they are read."""
        ...

    def is_behind(self, module: PagedModule, page_ids: np.ndarray) -> np.ndarray:
        """Mask: which weight pages would be worked on, together with their state."""
        ...


class Lease:
    """Pinned pages of one module and plane. While it lives, none of them moves; use as a context manager.

    On an accelerator ``reader_event`` is recorded by the last kernel that reads the pages and ``writer_event`` by the
    one that writes them; a slot is reused only after both. Without one both stay None: work is done when the call
    returns.
    """

    __slots__ = ("_held", "_ids", "_manager", "module", "plane", "reader_event", "writer_event")

    def __init__(self, manager: PageOwner, module: PagedModule, plane: Plane, ids: np.ndarray) -> None:
        self._manager = manager
        self._ids = ids
        self.module = module
        self.plane = plane
        self.reader_event: torch.cuda.Event | None = None
        self.writer_event: torch.cuda.Event | None = None
        manager.hold(ids)
        self._held = frozenset(ids.tolist())

    def page(self, expert: int, slice_: int) -> torch.Tensor:
        """The page's elements, flat, without the slot's unused tail."""
        return self._manager.page_tensor(self._page_id(expert, slice_))

    def views(self, expert: int, slice_: int) -> PageViews:
        """The operands of the products as views of the page."""
        return self._manager.page_views(self._page_id(expert, slice_))

    def _page_id(self, expert: int, slice_: int) -> int:
        entry = self.module.entry
        page_id = (entry.first_index + expert * entry.num_slices + slice_) * NUM_PLANES + int(self.plane)
        if page_id not in self._held:
            raise RuntimeError(f"{self._manager.numbering.describe(page_id)} is used without a lease")
        return page_id

    def mark_dirty(self) -> None:
        """The holder writes to every page of the lease; to be called before the first write."""
        self._manager.mark_dirty(self._ids)

    def release(self) -> None:
        """Ends the lease; idempotent."""
        if self._held:
            self._manager.release(self._ids)
            self._held = frozenset()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


@dataclass(frozen=True)
class Wave:
    """A batch of pages that are resident together: ``items`` (expert, slice) ascending, their leases by plane.

    ``fresh`` names the pages that were absent in the plane that the sweep creates.
    """

    items: Batch
    leases: Mapping[Plane, Lease]
    fresh: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class WholeWave:
    """All pages of a module, ascending by (expert, slice), where only the device knows which experts have tokens.

    ``weights_I``, ``gradients_I``: addresses, int64 ``[experts * slices]``, on the device; ``gradients_I`` None where
    no gradients are wanted. ``written_E`` int64 ``[experts]``: tokens that gradient pages hold so far, 0 where their
    contents are to be replaced; whoever computes the wave adds to it. See [Note: counts that come later].
    """

    weights_I: torch.Tensor
    gradients_I: torch.Tensor | None
    written_E: torch.Tensor | None

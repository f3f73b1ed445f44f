"""Planes, and the dense numbering of modules and pages.

Every later part names a page by one int32. The numbering is dense, so that the page table can be a handful of numpy
columns and a set of pages can be a numpy array.

[Note: page numbering]
Modules register in construction order and get dense module ids; a module's path in the model is its identity for
people and may become known later (a layer does not know its path while it is built). A module with ``E`` local
experts of ``S`` slices owns ``E * S`` consecutive *page indices*; the page index says nothing about planes. The page
id adds the plane:

    page_id = (first_index(module) + expert * S + slice) * len(Plane) + plane

so ids given out stay valid when more modules register, and turning a weight page into its gradient page is one
addition.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Plane(enum.IntEnum):
    """What the bytes of a page are. Each page exists at most once in each plane."""

    WEIGHT = 0  # parameters in the training dtype; always present
    GRADIENT = 1  # accumulated gradient; present only for experts that got tokens since the last step
    MASTER = 2  # fp32 copy of the parameters; present only where the training dtype is not fp32
    MOMENT1 = 3  # Adam's first moment m
    MOMENT2 = 4  # Adam's second moment v


NUM_PLANES = len(Plane)
"""A plain integer: an enum counts its members anew each time that it is asked."""


class PageKey(NamedTuple):
    """A page by name: (plane, module, expert, slice). ``expert`` is the local index on this rank."""

    plane: Plane
    module: int
    expert: int
    slice: int


@dataclass(frozen=True)
class ModuleEntry:
    """One registered module: dense id, number of local experts, slices an expert, first page index."""

    module: int
    num_experts: int
    num_slices: int
    first_index: int

    @property
    def num_pages(self) -> int:
        """Page indices owned by this module (pages a plane)."""
        return self.num_experts * self.num_slices


class PageNumbering:
    """Dense module ids over module paths, and dense page ids over (plane, module, expert, slice)."""

    def __init__(self) -> None:
        self._entries: list[ModuleEntry] = []
        self._paths: list[str] = []
        self._first: list[int] = []
        self._total = 0

    def register(self, *, path: str, num_experts: int, num_slices: int) -> ModuleEntry:
        """Gives the module at ``path`` the next dense id.

        Raises:
            RuntimeError: when the path is taken (layer numbers collide with multi-token prediction, interleaved
                chunks and two towers; paths do not).
        """
        if path in self._paths:
            raise RuntimeError(f"module path {path} is registered twice")
        entry = ModuleEntry(len(self._entries), num_experts, num_slices, self._total)
        self._entries.append(entry)
        self._paths.append(path)
        self._first.append(entry.first_index)
        self._total += entry.num_pages
        return entry

    def rename(self, module: int, path: str) -> None:
        """Gives a module its path in the finished model. Raises RuntimeError when another module has it."""
        if path in self._paths and self._paths.index(path) != module:
            raise RuntimeError(f"module path {path} belongs to module {self._paths.index(path)} already")
        self._paths[module] = path

    def path(self, module: int) -> str:
        """A module's path."""
        return self._paths[module]

    @property
    def entries(self) -> tuple[ModuleEntry, ...]:
        """All modules by id."""
        return tuple(self._entries)

    @property
    def num_indices(self) -> int:
        """Page indices over all modules (pages a plane)."""
        return self._total

    @property
    def num_pages(self) -> int:
        """Size of the page id space, all planes."""
        return self._total * NUM_PLANES

    def page_id(self, key: PageKey) -> int:
        """The dense int32 of a page (see [Note: page numbering])."""
        entry = self._entries[key.module]
        if not (0 <= key.expert < entry.num_experts and 0 <= key.slice < entry.num_slices):
            raise RuntimeError(
                f"{self._paths[key.module]}: no page (expert {key.expert}, slice {key.slice}); it has "
                f"{entry.num_experts} experts of {entry.num_slices} slices"
            )
        return (entry.first_index + key.expert * entry.num_slices + key.slice) * NUM_PLANES + int(key.plane)

    def page_ids(self, module: int, plane: Plane, experts: Sequence[int]) -> np.ndarray:
        """Page ids (int64) of all slices of ``experts`` in ``plane``, in the order of ``experts``, slices ascending."""
        entry = self._entries[module]
        wanted = np.asarray(experts, dtype=np.int64)
        outside = wanted[(wanted < 0) | (wanted >= entry.num_experts)]
        if len(outside):
            raise RuntimeError(
                f"{self._paths[module]}: no expert {outside[0]}; it has {entry.num_experts} experts of "
                f"{entry.num_slices} slices"
            )
        first = entry.first_index + wanted * entry.num_slices
        return (first[:, None] + np.arange(entry.num_slices)).reshape(-1) * NUM_PLANES + int(plane)

    def modules_of(self, indices: np.ndarray) -> np.ndarray:
        """Module ids of page indices (page id without its plane)."""
        found: np.ndarray = np.searchsorted(np.asarray(self._first), indices, side="right") - 1
        return found

    def module_of(self, index: int) -> int:
        """The module id of one page index; as :meth:`modules_of`, in a tenth of the time."""
        return bisect.bisect_right(self._first, index) - 1

    def key(self, page_id: int) -> PageKey:
        """The inverse of :meth:`page_id`."""
        if not 0 <= page_id < self.num_pages:
            raise RuntimeError(f"no page {page_id}; ids run from 0 to {self.num_pages - 1}")
        index, plane = divmod(page_id, NUM_PLANES)
        entry = self._entries[bisect.bisect_right(self._first, index) - 1]
        expert, slice_ = divmod(index - entry.first_index, entry.num_slices)
        return PageKey(Plane(plane), entry.module, expert, slice_)

    def describe(self, page_id: int) -> str:
        """A page's name for messages, e.g. ``weight page of decoder.layers.1.mlp.experts, expert 3, slice 0``."""
        key = self.key(page_id)
        return f"{key.plane.name.lower()} page of {self._paths[key.module]}, expert {key.expert}, slice {key.slice}"

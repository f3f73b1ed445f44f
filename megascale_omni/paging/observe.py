"""What somebody may want to see of a manager's work: traces, heat, tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megascale_omni.paging.forecast import Visit


class Observer:
    """Told of everything that happens to pages, on the main thread, after it happened. Page ids are int64 arrays.

    An observer must not change anything, and must copy what it keeps. What it does not override it does not see.
    """

    def visited(self, visit: Visit, pages: np.ndarray) -> None:
        """A sweep over pages of a module begins (numbers from 0 in the module)."""

    def routed(self, module: int, counts: np.ndarray) -> None:
        """A forward of a training step sends ``counts`` tokens to each expert of a module."""

    def reached(self, page: int) -> None:
        """All pages of the sweep's current group are held; ``page`` is the last of them (number in the module)."""

    def working(self, module: int) -> None:
        """A wave of a module is handed out: work on it begins ..."""

    def worked(self, module: int) -> None:
        """... and has ended, or has been issued to an accelerator."""

    def held(self, page_ids: np.ndarray) -> None:
        """A lease brought pages to the device arena and pinned them."""

    def released(self, page_ids: np.ndarray) -> None:
        """The lease has ended."""

    def created(self, page_ids: np.ndarray) -> None:
        """Absent pages got slots."""

    def dropped(self, page_ids: np.ndarray) -> None:
        """Pages became absent."""

    def written(self, page_ids: np.ndarray) -> None:
        """A holder announced that it changes pages."""


@dataclass(frozen=True)
class StoredHeat:
    """What the ranks of a saved run had of a module's heat, and which of its experts are here.

    ``found``: of each rank that had some of them. ``numbers``: global numbers of the local experts, of ``num_experts``
    in the layer. This rank is number ``rank`` of ``size`` that have these experts.
    """

    found: Sequence[Mapping[str, Any]]
    numbers: Sequence[int]
    num_experts: int
    rank: int = 0
    size: int = 1


class KeepsHeat(Protocol):
    """Who keeps the heat of a manager's experts, as checkpoints see it. Modules by their number."""

    def stored(self, module: int, numbers: Sequence[int]) -> dict[str, Any]:
        """Plain values of a module whose local experts are globally ``numbers``."""
        ...

    def restore(self, modules: Mapping[int, StoredHeat]) -> None:
        """Goes on from what was stored."""
        ...

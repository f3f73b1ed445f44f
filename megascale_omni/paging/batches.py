"""Batches: consecutive pages of a module that are worked on together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megascale_omni.paging.layout import MIB, PageLayout

Batch = tuple[tuple[int, int], ...]
"""Consecutive pages (expert, slice) of one width that are worked on together."""

BATCH_BYTES = 2 * MIB
"""Weight bytes of a batch, unless a single page is larger. The smallest wave is one batch."""


def batch_pages(layout: PageLayout, dtype: torch.dtype) -> int:
    """Pages of a batch at most."""
    return max(1, BATCH_BYTES // layout.slot_class(dtype).nbytes)


def cut_batches(layout: PageLayout, *, dtype: torch.dtype, experts: Sequence[int]) -> tuple[Batch, ...]:
    """Cuts the pages of ``experts`` (ascending) into batches.

    The cut depends on layout, dtype and experts alone, so that it is the same whatever is resident. A batch has pages
    of one width; a short last slice is a batch of its own.
    """
    limit = batch_pages(layout, dtype)
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

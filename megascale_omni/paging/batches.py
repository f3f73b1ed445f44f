"""Batches: consecutive pages of a module that are worked on together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megascale_omni.paging.layout import MIB, PageLayout

Batch = tuple[tuple[int, int], ...]
"""Consecutive pages (expert, slice) of one width that are worked on together."""

BATCH_BYTES = 2 * MIB
"""Weight bytes of a batch, unless a single page is larger. The smallest wave is one batch."""


RESIDENT_BATCH_BYTES = 128 * MIB
"""The same on an accelerator where no page ever leaves: few, large launches, and no budget that a wave must fit in.
There elementwise kernels round no tail otherwise, so that the cut changes no bit."""


def batch_pages(layout: PageLayout, dtype: torch.dtype, *, nbytes: int | None = None) -> int:
    """Pages of a batch of ``nbytes`` (default ``BATCH_BYTES``) at most."""
    return max(1, (BATCH_BYTES if nbytes is None else nbytes) // layout.slot_class(dtype).nbytes)


def cut_batches(
    layout: PageLayout, *, dtype: torch.dtype, experts: Sequence[int], nbytes: int | None = None
) -> tuple[Batch, ...]:
    """Cuts the pages of ``experts`` (ascending) into batches of ``nbytes`` (default ``BATCH_BYTES``) at most.

    The cut depends on layout, dtype and experts alone, so that it is the same whatever is resident. A batch has pages
    of one width; a short last slice is a batch of its own.
    """
    limit = batch_pages(layout, dtype, nbytes=nbytes)
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

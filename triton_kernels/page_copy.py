"""Copies of whole pages, many in one launch: gathered from where they lie, scattered to where they go."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
import triton
import triton.language as tl

from megascale_omni.kernels.checks import require, require_address
from megascale_omni.kernels.segments import pointer_to, require_flat, same_device, upload

BLOCK = 4096


@triton.jit(do_not_specialize_on_alignment=["addresses"])
def page_copy(addresses, words, BLOCK: tl.constexpr):
    """Copies pages from one address to another.

    Formula: target_i[w] = source_i[w], as they are.
    Shapes: addresses int64 [pages, 2] (source, target; bytes), ``words`` 4-byte words a page.
    Layout: pages lie anywhere, at multiples of 16 bytes. A program is BLOCK words of one page.
    """
    row = addresses + 2 * tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source, target = tl.load(row), tl.load(row + 1)
    tl.device_assert((source != 0) & (target != 0), "a page that is not resident is copied")
    value = tl.load(pointer_to(source, tl.int32, True) + at, mask=at < words)
    tl.store(pointer_to(target, tl.int32, True) + at, value, mask=at < words)


def copy_pages(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copies each source page to the target page of the same place; all of one dtype and length.

    Raises:
        ValueError: pages that do not fit each other, are not aligned, or whose bytes are no whole words.
    """
    if len(sources) != len(targets):
        raise ValueError(f"targets: {len(targets)} pages for {len(sources)} sources")
    if not sources:
        return
    first, device = sources[0], same_device("page", [*sources, *targets])
    for name, pages in (("source", sources), ("target", targets)):
        for page in pages:
            require_flat(name, page, dtypes=(first.dtype,), numel=first.numel())
            require_address(name, page.data_ptr())
    nbytes = first.numel() * first.element_size()
    if nbytes % 4:
        raise ValueError(f"source: {nbytes} bytes a page, must be a multiple of 4")
    _refuse_overlap(sources, targets, nbytes)
    table = np.asarray([[s.data_ptr(), t.data_ptr()] for s, t in zip(sources, targets, strict=True)], dtype=np.int64)
    if nbytes:
        page_copy[(len(table), triton.cdiv(nbytes // 4, BLOCK))](*upload(device, table), nbytes // 4, BLOCK=BLOCK)


def _refuse_overlap(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], nbytes: int) -> None:
    """Programs have no order: a target that another copy reads or writes would get a mixture."""
    spans = sorted([(t.data_ptr(), True) for t in targets] + [(s.data_ptr(), False) for s in sources])
    for (first, one), (second, other) in pairwise(spans):
        if (one or other) and second < first + nbytes:
            raise ValueError(
                f"target: the page at {second if other else first:#x} is also read or written by this call"
            )


def gather_pages(pages: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """``out [pages, n]``: the pages one after the other. Raises ValueError where they do not fit."""
    if pages:
        require("out", out, dtype=pages[0].dtype, device=pages[0].device, shape=(len(pages), pages[0].numel()))
    copy_pages(pages, list(out))


def scatter_pages(rows: torch.Tensor, pages: Sequence[torch.Tensor]) -> None:
    """The inverse: row ``i`` goes to page ``i``. Raises ValueError where they do not fit."""
    if pages:
        require("rows", rows, dtype=pages[0].dtype, device=pages[0].device, shape=(len(pages), pages[0].numel()))
    copy_pages(list(rows), pages)

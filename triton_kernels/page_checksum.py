"""A checksum of pages where they lie, without bringing them to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from megascale_omni.kernels.checks import require_address
from megascale_omni.kernels.segments import (
    all_aligned,
    blocks_of,
    count_at,
    pointer_to,
    require_flat,
    same_device,
    upload,
)

BLOCK = 2048


@triton.jit(do_not_specialize_on_alignment=["pages", "blocks"])
def page_checksum(pages, blocks, out, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Two sums over a page's words, the second of which sees their order.

    Formula: s1 = sum_i w_i, s2 = sum_i (i + 1) w_i, both modulo 2^64 (Fletcher's idea).
    Shapes: w int32 words of a page, out int64 [pages, 2].
    Layout: a row of ``pages`` is (address, words). Integer sums have no order, so programs add theirs atomically. A
        program is BLOCK words of one page.
    """
    number = tl.program_id(0)
    page, start = tl.load(blocks + 2 * number), count_at(blocks + 2 * number + 1, ALIGNED)
    address = tl.load(pages + 2 * page)
    tl.device_assert(address != 0, "a page that is not resident is read")
    at = start + tl.arange(0, BLOCK)
    mask = at < count_at(pages + 2 * page + 1, ALIGNED)
    w = tl.load(pointer_to(address, tl.int32, True) + at, mask=mask, other=0).to(tl.int64)
    tl.atomic_add(out + 2 * page, tl.sum(w, axis=0), sem="relaxed")
    tl.atomic_add(out + 2 * page + 1, tl.sum(w * (at + 1), axis=0), sem="relaxed")


def page_checksums(pages: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 ``[pages, 2]`` on the pages' device. Equal sums of equal words, wherever they lie.

    Raises:
        ValueError: a page that is not contiguous or aligned, or whose bytes are no whole words.
    """
    if not pages:
        return torch.zeros(0, 2, dtype=torch.int64)
    device = same_device("page", pages)
    table = np.zeros((len(pages), 2), dtype=np.int64)
    for number, page in enumerate(pages):
        require_flat("page", page, dtypes=(page.dtype,))
        if page.numel():
            require_address("page", page.data_ptr())
        nbytes = page.numel() * page.element_size()
        if nbytes % 4:
            raise ValueError(f"page: {nbytes} bytes, must be a multiple of 4")
        table[number] = page.data_ptr(), nbytes // 4
    blocks = blocks_of(table[:, 1], BLOCK)
    out = torch.zeros(len(pages), 2, dtype=torch.int64, device=device)
    if len(blocks):
        aligned = all_aligned(table)
        page_checksum[(len(blocks),)](*upload(device, table, blocks), out, ALIGNED=aligned, BLOCK=BLOCK)
    return out

"""fp32 gradients as bf16 for the wire, and back into fp32 sums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from megascale_omni.kernels.checks import require
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


@triton.jit(do_not_specialize_on_alignment=["segments", "blocks"])
def bf16_wire(
    segments, blocks, wire, PACK: tl.constexpr, ADD: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """Moves fp32 segments to a bf16 buffer (PACK), or from there into (ADD: onto) the segments.

    Formula: wire = bf16(g), to nearest even; back: g = fp32(wire), or g += fp32(wire).
    Shapes: g fp32 [n] a segment, wire bf16 [sum of n].
    Layout: a row of ``segments`` is (address, n, first element in the wire). A program is BLOCK elements of a
        segment.
    """
    number = tl.program_id(0)
    row = segments + 3 * tl.load(blocks + 2 * number)
    at = count_at(blocks + 2 * number + 1, ALIGNED) + tl.arange(0, BLOCK)
    address = tl.load(row)
    tl.device_assert(address != 0, "a gradient that is not resident is read or written")
    g_at = pointer_to(address, tl.float32, ALIGNED) + at
    w_at = wire + count_at(row + 2, ALIGNED) + at
    mask = at < count_at(row + 1, ALIGNED)
    if PACK:
        tl.store(w_at, tl.load(g_at, mask=mask, other=0.0).to(tl.bfloat16), mask=mask)
    else:
        g = tl.load(w_at, mask=mask, other=0.0).to(tl.float32)
        if ADD:
            g += tl.load(g_at, mask=mask, other=0.0)
        tl.store(g_at, g, mask=mask)


def pack_bf16(gradients: Sequence[torch.Tensor], wire: torch.Tensor) -> None:
    """Writes the fp32 gradients one after the other into ``wire`` (bf16). Raises ValueError where they do not fit."""
    _launch(gradients, wire, pack=True, add=False)


def unpack_bf16(wire: torch.Tensor, gradients: Sequence[torch.Tensor], *, add: bool) -> None:
    """The inverse; with ``add`` the numbers are added in fp32. Raises ValueError where they do not fit."""
    _launch(gradients, wire, pack=False, add=add)


def _launch(gradients: Sequence[torch.Tensor], wire: torch.Tensor, *, pack: bool, add: bool) -> None:
    if not gradients:
        return
    device = same_device("gradient", gradients)
    for gradient in gradients:
        require_flat("gradient", gradient, dtypes=(torch.float32,))
    numels = np.asarray([g.numel() for g in gradients], dtype=np.int64)
    require("wire", wire, dtype=torch.bfloat16, device=device, shape=(int(numels.sum()),))
    starts = np.cumsum(numels) - numels
    table = np.stack([np.asarray([g.data_ptr() for g in gradients], dtype=np.int64), numels, starts], axis=1)
    blocks = blocks_of(numels, BLOCK)
    if len(blocks):
        aligned = all_aligned(table)
        bf16_wire[(len(blocks),)](
            *upload(device, table, blocks), wire, PACK=pack, ADD=add, ALIGNED=aligned, BLOCK=BLOCK
        )

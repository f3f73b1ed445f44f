"""Gradients times their group's clip coefficient, in place, with coefficients that never leave the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from megascale_omni.kernels.checks import require
from megascale_omni.kernels.segments import (
    DTYPES,
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
def scaled_clip(segments, blocks, coefficients, GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Scales the gradients of every group that is to be clipped.

    Formula: g *= c[group]; where c is 1 nothing is read or written.
    Shapes: g [n] of dtype GRADIENT a segment, c fp32 [groups].
    Layout: a row of ``segments`` is (address, n, group). A program is BLOCK elements of one segment.
    """
    number = tl.program_id(0)
    row = segments + 3 * tl.load(blocks + 2 * number)
    coefficient = tl.load(coefficients + tl.load(row + 2))
    if coefficient == 1.0:
        return
    address = tl.load(row)
    tl.device_assert(address != 0, "a gradient that is not resident is scaled")
    at = count_at(blocks + 2 * number + 1, ALIGNED) + tl.arange(0, BLOCK)
    g_at = pointer_to(address, GRADIENT, ALIGNED) + at
    mask = at < count_at(row + 1, ALIGNED)
    g = tl.load(g_at, mask=mask, other=0.0).to(tl.float32) * coefficient
    tl.store(g_at, g.to(GRADIENT), mask=mask)


def scale_groups(groups: Sequence[Sequence[torch.Tensor]], coefficients: torch.Tensor) -> None:
    """Multiplies the gradients of group ``i`` by ``coefficients[i]`` (fp32, on their device).

    Raises:
        ValueError: a gradient or the coefficients do not fit.
    """
    gradients = [gradient for group in groups for gradient in group]
    if not gradients:
        return
    device, dtype = same_device("gradient", gradients), gradients[0].dtype
    require("coefficients", coefficients, dtype=torch.float32, device=device, shape=(len(groups),))
    for gradient in gradients:
        require_flat("gradient", gradient, dtypes=(dtype,) if dtype in DTYPES else tuple(DTYPES))
    table = np.asarray(
        [[g.data_ptr(), g.numel(), number] for number, group in enumerate(groups) for g in group], dtype=np.int64
    )
    blocks = blocks_of(table[:, 1], BLOCK)
    if len(blocks):
        scaled_clip[(len(blocks),)](
            *upload(device, table, blocks),
            coefficients,
            GRADIENT=DTYPES[dtype],
            ALIGNED=all_aligned(table[:, :2]),
            BLOCK=BLOCK,
        )

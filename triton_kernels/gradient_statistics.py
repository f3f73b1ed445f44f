"""Statistics of gradients by group, in one pass over them: what clipping and the norm need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

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

BLOCK = 1024
CHUNK = 16 * BLOCK
"""Elements of a program; the partial sums of a chunk are one row."""
COLUMNS = ("n", "sum", "abs", "squares", "max", "non_finite", "non_zero")
NUM_COLUMNS = tl.constexpr(len(COLUMNS))


@triton.jit(do_not_specialize_on_alignment=["segments", "chunks"])
def gradient_statistics(
    segments, chunks, partials, GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Partial sums of every chunk of the gradients.

    Formula: n, sum g, sum |g|, sum g^2, max |g| of the finite elements, and how many are not finite, and not zero.
    Shapes: g [n] of dtype GRADIENT a segment, partials fp64 [chunks, 7].
    Layout: a row of ``segments`` is (address, n). Sums are fp64 throughout: they neither overflow nor depend on how a
        module is cut by more than their last bits. A program is one chunk of CHUNK elements.
    """
    number = tl.program_id(0)
    segment, start = tl.load(chunks + 2 * number), count_at(chunks + 2 * number + 1, ALIGNED)
    numel = count_at(segments + 2 * segment + 1, ALIGNED)
    address = tl.load(segments + 2 * segment)
    tl.device_assert(address != 0, "a gradient that is not resident is measured")
    g_at = pointer_to(address, GRADIENT, ALIGNED) + start
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    absolute = tl.zeros((BLOCK,), dtype=tl.float64)
    squares = tl.zeros((BLOCK,), dtype=tl.float64)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    bad = tl.zeros((BLOCK,), dtype=tl.int32)
    other = tl.zeros((BLOCK,), dtype=tl.int32)
    for step in range(0, CHUNK, BLOCK):
        at = step + tl.arange(0, BLOCK)
        g = tl.load(g_at + at, mask=at < numel - start, other=0.0).to(tl.float32)
        finite = tl.abs(g) < float("inf")
        bad += (finite == 0).to(tl.int32)
        other += (g != 0.0).to(tl.int32)
        g = tl.where(finite, g, 0.0)
        largest = tl.maximum(largest, tl.abs(g))
        wide = g.to(tl.float64)
        total += wide
        absolute += tl.abs(wide)
        squares += wide * wide
    out = partials + number * NUM_COLUMNS
    count = tl.minimum(numel - start, CHUNK)
    not_finite = tl.sum(bad, axis=0)
    tl.store(out, (count - not_finite).to(tl.float64))
    tl.store(out + 1, tl.sum(total, axis=0))
    tl.store(out + 2, tl.sum(absolute, axis=0))
    tl.store(out + 3, tl.sum(squares, axis=0))
    tl.store(out + 4, tl.max(largest, axis=0).to(tl.float64))
    tl.store(out + 5, not_finite.to(tl.float64))
    tl.store(out + 6, tl.sum(other, axis=0).to(tl.float64))


@triton.jit
def add_statistics(partials, bounds, out, BLOCK: tl.constexpr):
    """Adds the partial sums of every group, in the order of chunks.

    Formula: out[group] = sum (column "max": maximum) of partials over the group's chunks.
    Shapes: partials fp64 [chunks, 7], bounds int64 [groups + 1] (first chunk of each), out fp64 [groups, 7].
    Layout: chunks of a group are consecutive. A program is one column of one group.
    """
    group, column = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(bounds + group), tl.load(bounds + group + 1)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    source = partials + (first + tl.arange(0, BLOCK)) * NUM_COLUMNS + column
    for step in range(0, (last - first).to(tl.int32), BLOCK):
        values = tl.load(source, mask=step + tl.arange(0, BLOCK) < last - first, other=0.0)
        total = tl.where(column == 4, tl.maximum(total, values), total + values)
        source += BLOCK * NUM_COLUMNS
    result = tl.where(column == 4, tl.max(total, axis=0), tl.sum(total, axis=0))
    tl.store(out + group * NUM_COLUMNS + column, result)


def statistics_of_groups(groups: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """fp64 ``[groups, 7]``, columns as in ``COLUMNS``, of gradients (flat, one dtype) by group; nothing waits for it.

    ``n`` counts finite elements, ``non_zero`` all that are not zero.

    Raises:
        ValueError: no gradient at all, or one that does not fit the others.
    """
    gradients = [gradient for group in groups for gradient in group]
    if not gradients:
        raise ValueError("groups: no gradient in any of them")
    device, dtype = same_device("gradient", gradients), gradients[0].dtype
    for gradient in gradients:
        require_flat("gradient", gradient, dtypes=(dtype,) if dtype in DTYPES else tuple(DTYPES))
    table = np.asarray([[g.data_ptr(), g.numel()] for g in gradients], dtype=np.int64)
    chunks = blocks_of(table[:, 1], CHUNK)
    group_of = np.repeat(np.arange(len(groups)), [len(group) for group in groups])[chunks[:, 0]]
    bounds = np.searchsorted(group_of, np.arange(len(groups) + 1))
    partials = torch.empty(len(chunks), len(COLUMNS), dtype=torch.float64, device=device)
    out = torch.zeros(len(groups), len(COLUMNS), dtype=torch.float64, device=device)
    if len(chunks):
        segments_table, chunks_table, bounds_table = upload(device, table, chunks, bounds)
        gradient_statistics[(len(chunks),)](
            segments_table,
            chunks_table,
            partials,
            GRADIENT=DTYPES[dtype],
            ALIGNED=all_aligned(table),
            CHUNK=CHUNK,
            BLOCK=BLOCK,
        )
        add_statistics[(len(groups), len(COLUMNS))](partials, bounds_table, out, BLOCK=256)
    return out

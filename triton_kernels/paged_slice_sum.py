"""Sums over an expert's pages: the second product of the forward, and the input gradient of the first one."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from megascale_omni.kernels.checks import require
from megascale_omni.kernels.paged_fc1 import PageShape, block_of, neurons_of, precision_of
from megascale_omni.kernels.segments import pointer_to
from megascale_omni.kernels.tiles import GROUP, TileConfig, tile_of
from megascale_omni.kernels.wave import CHAIN_COLUMNS, ITEM_COLUMNS, WaveTables

COLUMNS = tl.constexpr(ITEM_COLUMNS)
CHAIN = tl.constexpr(CHAIN_COLUMNS)

Matrix = Literal["down", "fc1"]


@triton.jit(do_not_specialize=["row_tiles", "columns"], do_not_specialize_on_alignment=["items", "chains", "tiles"])
def paged_slice_sum(
    left,
    out,
    carried_in,
    carried_out,
    items,
    chains,
    tiles,
    hidden,
    row_tiles,
    columns,
    WIDE: tl.constexpr,
    SKIP: tl.constexpr,
    DIVISIBLE: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The sum over the pages of every expert of a wave, in slice order.

    Formula: out = sum_s left_s W_s, rounded once; a sum that other waves begin or end is carried in fp32.
    Shapes: left_s [n, WIDE r] for the n tokens of the expert, W_s [WIDE r, hidden], out [N, hidden],
        carried [n, hidden].
    Layout: left_s is the page's block of the wave, row-major; W_s begins SKIP r hidden elements into the page (SKIP 0:
        gate | up rows, 2 or 1: down rows). A program is one tile of n x hidden and walks the expert's pages.
    """
    tile, n_tile = tile_of(tl.program_id(0), row_tiles, columns, GROUP)
    n0 = n_tile * BN
    chain = chains + tl.load(tiles + 2 * tile) * CHAIN
    m0 = tl.load(tiles + 2 * tile + 1)
    first, count = tl.load(chain).to(tl.int32), tl.load(chain + 1).to(tl.int32)
    rows = tl.load(chain + 3).to(tl.int32)
    rm, rn, rk = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    in_m, in_n = rm < rows - m0, rn < hidden - n0
    mask = in_m[:, None] & in_n[None, :]
    at = m0.to(tl.int64) * hidden + n0 + (rm[:, None] * hidden + rn[None, :])
    total = tl.zeros((BM, BN), dtype=tl.float32)
    if tl.load(chain + 4) == 0:
        total = tl.load(carried_in + at, mask=mask, other=0.0)
    DTYPE: tl.constexpr = left.dtype.element_ty
    for number in range(first, first + count):
        row = items + number * COLUMNS
        address = tl.load(row)
        tl.device_assert(address != 0, "a page that is not resident is read")
        page = pointer_to(address, DTYPE, True)
        neurons = neurons_of(row, DIVISIBLE)
        width = WIDE * neurons
        a_from = left + WIDE * (block_of(row, 5, DIVISIBLE) + m0.to(tl.int64) * neurons)
        a_at = a_from + (rm[:, None] * width + rk[None, :])
        w_at = page + SKIP * neurons * hidden + n0 + (rk[:, None] * hidden + rn[None, :])
        for k in range(0, width, BK):
            in_k = rk < width - k
            a = tl.load(a_at + k, mask=in_m[:, None] & in_k[None, :], other=0.0)
            b = tl.load(w_at + k * hidden, mask=in_k[:, None] & in_n[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
    if tl.load(chain + 5) != 0:
        out_at = out + tl.load(chain + 2) * hidden + at
        tl.store(out_at, total.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(carried_out + at, total, mask=mask)


def launch_slice_sum(
    *,
    left: torch.Tensor,
    out: torch.Tensor,
    carried_in: torch.Tensor,
    carried_out: torch.Tensor,
    wave: WaveTables,
    shape: PageShape,
    matrix: Matrix,
    tile: TileConfig,
    debug: bool = False,
) -> None:
    """Adds up ``left`` times the pages' down or fc1 rows into ``out [N, hidden]``; see :func:`paged_slice_sum`.

    Sums that do not end in this wave go to ``carried_out``, sums that began before it come from ``carried_in`` (fp32,
    rows of the expert that is cut; the two must not be one buffer). Raises ValueError for a tensor that does not fit.
    """
    device, wide = wave.items.device, 1 if matrix == "down" else shape.wide
    wave.require_tiles("tile", tile.m, of_chains=True)
    shape.require_offsets(wave, tile)
    floats = (torch.float32, torch.bfloat16, torch.float16)
    require("left", left, dtype=floats, device=device, least=wide * wave.block)
    require("out", out, dtype=left.dtype, device=device, shape=(None, shape.hidden), rows=wave.tokens)
    for name, carried in (("carried_in", carried_in), ("carried_out", carried_out)):
        require(name, carried, dtype=torch.float32, device=device, shape=(None, shape.hidden), rows=wave.cut)
    if _overlap(carried_in, carried_out):
        raise ValueError("carried_in and carried_out: one buffer; sums of two experts would meet in it")
    if not wave.rows:
        return
    row_tiles, columns = wave.chain_tiles.shape[0], triton.cdiv(shape.hidden, tile.n)
    paged_slice_sum[(row_tiles * columns,)](
        left,
        out,
        carried_in,
        carried_out,
        wave.items,
        wave.chains,
        wave.chain_tiles,
        shape.hidden,
        row_tiles,
        columns,
        WIDE=wide,
        SKIP=shape.wide if matrix == "down" else 0,
        DIVISIBLE=wave.divisible,
        PRECISION=precision_of(left.dtype),
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        GROUP=GROUP,
        debug=debug,
        **tile.launch,
    )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    (first, size), (second, other_size) = ((t.data_ptr(), t.numel() * t.element_size()) for t in (one, other))
    return first < second + other_size and second < first + size

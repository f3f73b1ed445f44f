"""Weight gradients of a wave, accumulated in the gradient pages themselves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megascale_omni.kernels.checks import require
from megascale_omni.kernels.paged_fc1 import PageShape, block_of, neurons_of, precision_of, source_of
from megascale_omni.kernels.paged_slice_sum import Matrix
from megascale_omni.kernels.segments import DTYPES, pointer_to
from megascale_omni.kernels.tiles import GROUP, TileConfig, tile_of
from megascale_omni.kernels.wave import ITEM_COLUMNS, WaveTables

COLUMNS = tl.constexpr(ITEM_COLUMNS)


@triton.jit(
    do_not_specialize=["sources", "num_items", "row_tiles", "columns"], do_not_specialize_on_alignment=["items"]
)
def paged_weight_gradient(
    left,
    right,
    index,
    items,
    hidden,
    sources,
    num_items,
    row_tiles,
    columns,
    GRADIENT: tl.constexpr,
    WIDE: tl.constexpr,
    SKIP: tl.constexpr,
    INDEX: tl.constexpr,
    DIVISIBLE: tl.constexpr,
    ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The weight gradient of every page of a wave, stored in its gradient page or added to it.

    Formula: dW (+)= round(left^T right[index]), rounded to the operands' dtype (unless not ROUNDED), added in the
        page's dtype.
    Shapes: left [n, WIDE r] a page, right [sources, hidden], index [N] (rows of right; none: the rows themselves),
        dW [WIDE r, hidden].
    Layout: left is the page's block of the wave; dW begins SKIP r hidden elements into the gradient page, of dtype
        GRADIENT. Tokens are summed in ascending order. A program is one tile of r x hidden.
    """
    tile, n_tile = tile_of(tl.program_id(0), num_items * row_tiles, columns, GROUP)
    number, m0 = tile // row_tiles, (tile % row_tiles) * BM
    row = items + number * COLUMNS
    neurons = neurons_of(row, DIVISIBLE)
    width = WIDE * neurons
    if m0 >= width:
        return
    DTYPE: tl.constexpr = left.dtype.element_ty
    flagged = tl.load(row + 7)
    fresh = flagged % 16
    address = flagged - fresh
    tl.device_assert(address != 0, "a gradient page that is not resident is written")
    page = pointer_to(address, GRADIENT, True)
    rows = tl.load(row + 2).to(tl.int32)
    n0 = n_tile * BN
    rm, rn, rk = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    in_m, in_n = rm < width - m0, rn < hidden - n0
    token = tl.load(row + 1)
    l_at = left + WIDE * block_of(row, 5, DIVISIBLE) + m0 + (rm[:, None] + rk[None, :] * width)
    r_at = right + token * hidden + n0 + (rk[:, None] * hidden + rn[None, :])
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, rows, BK):
        in_k = rk < rows - k
        if INDEX:
            source, in_k = source_of(index, token + k, rk, in_k, sources)
            r_at = right + n0 + source[:, None] * hidden + rn[None, :]
        a = tl.load(l_at, mask=in_m[:, None] & in_k[None, :], other=0.0)
        b = tl.load(r_at, mask=in_k[:, None] & in_n[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        l_at += BK * width
        if not INDEX:
            r_at += BK * hidden
    mask = in_m[:, None] & in_n[None, :]
    at = page + (SKIP * neurons + m0) * hidden + n0 + (rm[:, None] * hidden + rn[None, :])
    result = total.to(DTYPE).to(tl.float32) if ROUNDED else total
    if fresh == 0:
        result += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, result.to(GRADIENT), mask=mask)


def launch_weight_gradient(
    *,
    left: torch.Tensor,
    right: torch.Tensor,
    index: torch.Tensor | None,
    gradient: torch.dtype,
    wave: WaveTables,
    shape: PageShape,
    matrix: Matrix,
    tile: TileConfig,
    rounded: bool = True,
    debug: bool = False,
) -> None:
    """Stores or adds the gradients of the pages' down or fc1 rows; see :func:`paged_weight_gradient`.

    ``gradient`` is the dtype of the gradient pages; ``rounded``: whether a product is rounded to that of its operands
    before it is added. Raises ValueError for a tensor that does not fit.
    """
    device, floats = wave.items.device, (torch.float32, torch.bfloat16, torch.float16)
    wide = 1 if matrix == "down" else shape.wide
    shape.require_offsets(wave, tile)
    require("left", left, dtype=floats, device=device, least=wide * wave.block)
    tokens = wave.tokens if index is None else 0
    require("right", right, dtype=left.dtype, device=device, shape=(None, shape.hidden), rows=tokens)
    if gradient not in (torch.float32, left.dtype):
        raise ValueError(f"gradient: dtype {gradient}, must be torch.float32 or {left.dtype}")
    if index is not None:
        require("index", index, dtype=(torch.int32, torch.int64), device=device, shape=(None,), rows=wave.tokens)
    if wave.without_gradient is not None:
        raise ValueError(f"gradient page of {wave.without_gradient}: address 0, the page is not resident")
    if not wave.num_items:
        return
    row_tiles = triton.cdiv(wide * wave.neurons, tile.m)
    columns = triton.cdiv(shape.hidden, tile.n)
    paged_weight_gradient[(wave.num_items * row_tiles * columns,)](
        left,
        right,
        index,
        wave.items,
        shape.hidden,
        right.shape[0],
        wave.num_items,
        row_tiles,
        columns,
        GRADIENT=DTYPES[gradient],
        WIDE=wide,
        SKIP=shape.wide if matrix == "down" else 0,
        INDEX=index is not None,
        DIVISIBLE=wave.divisible,
        ROUNDED=rounded,
        PRECISION=precision_of(left.dtype),
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        GROUP=GROUP,
        debug=debug,
        **tile.launch,
    )

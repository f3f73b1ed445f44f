"""Gradient of the second product's input, and the activation's backward in its epilogue."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megascale_omni.kernels.activations import act, act_backward, gated, gated_backward, rounded
from megascale_omni.kernels.checks import require
from megascale_omni.kernels.paged_fc1 import PageShape, block_of, neurons_of, precision_of, source_of
from megascale_omni.kernels.segments import pointer_to
from megascale_omni.kernels.tiles import GROUP, TileConfig, tile_of
from megascale_omni.kernels.wave import ITEM_COLUMNS, WaveTables

COLUMNS = tl.constexpr(ITEM_COLUMNS)


@triton.jit(
    do_not_specialize=["sources", "wave_rows", "row_tiles", "columns"],
    do_not_specialize_on_alignment=["items", "tiles"],
)
def paged_activation_backward(
    grad_y,
    index,
    probs,
    pre,
    activated,
    grad_pre,
    partials,
    items,
    tiles,
    hidden,
    wave_rows,
    sources,
    row_tiles,
    columns,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    CLAMP: tl.constexpr,
    OFFSET: tl.constexpr,
    INDEX: tl.constexpr,
    PROBS: tl.constexpr,
    ACTIVATED: tl.constexpr,
    PARTIALS: tl.constexpr,
    WIDE_PROBS: tl.constexpr,
    DIVISIBLE: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Gradients of the pre-activations of every page of a wave, the activations again, partial sums for the probs.

    Formula: g = dy[index] Wd^T;  dh = act'(h) (probs g);  a = probs act(h);  dprobs = sum over r of act(h) g.
    Shapes: dy [sources, hidden], index [N] (rows of dy; none: the rows themselves), Wd [r, hidden] a page,
        h and dh [n, M' r], a [n, r], partials [tiles of r, rows of the wave].
    Layout: h lies in the flat pre-activations, dh and a in the page's block of the wave. Every tile of r writes its own
        row of partials, which are added up in a fixed order later. A program is one tile of n x r.
    """
    tile, n_tile = tile_of(tl.program_id(0), row_tiles, columns, GROUP)
    n0 = n_tile * BN
    row = items + tl.load(tiles + 2 * tile) * COLUMNS
    m0 = tl.load(tiles + 2 * tile + 1)
    neurons = neurons_of(row, DIVISIBLE)
    if n0 >= neurons:
        return
    DTYPE: tl.constexpr = grad_y.dtype.element_ty
    WIDE: tl.constexpr = 2 if GATED else 1
    address = tl.load(row)
    tl.device_assert(address != 0, "a page that is not resident is read")
    page = pointer_to(address, DTYPE, True)
    token = tl.load(row + 1) + m0
    rm, rn, rk = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    in_m, in_n = rm < tl.load(row + 2).to(tl.int32) - m0, rn < neurons - n0
    in_g = in_m
    if INDEX:
        source, in_g = source_of(index, token, rm, in_m, sources)
        g_at = grad_y + source[:, None] * hidden + rk[None, :]
    else:
        g_at = grad_y + token * hidden + (rm[:, None] * hidden + rk[None, :])
    w_at = page + (WIDE * neurons + n0) * hidden + (rn[None, :] * hidden + rk[:, None])
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, hidden, BK):
        in_k = rk < hidden - k
        a = tl.load(g_at + k, mask=in_g[:, None] & in_k[None, :], other=0.0)
        b = tl.load(w_at + k, mask=in_k[:, None] & in_n[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if INDEX:
        total = tl.where(in_g[:, None], total, float("nan"))
    grad = rounded(total, DTYPE)
    mask = in_m[:, None] & in_n[None, :]
    before = m0.to(tl.int64) * neurons
    at = rm[:, None] * (WIDE * neurons) + rn[None, :]
    h_at = pre + WIDE * (block_of(row, 3, DIVISIBLE) + before) + n0 + at
    first = tl.load(h_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.zeros((BM, BN), dtype=tl.float32)
    if GATED:
        second = tl.load(h_at + neurons, mask=mask, other=0.0).to(tl.float32)
    p = tl.full((BM,), 1.0, dtype=tl.float32)
    if PROBS:
        p = tl.load(probs + token + rm, mask=in_m, other=0.0).to(tl.float32)
    block = block_of(row, 5, DIVISIBLE) + before
    if ACTIVATED or PARTIALS:
        if GATED:
            y = gated(first, second, KIND, ALPHA, CLAMP, OFFSET, DTYPE)
        else:
            y = act(first, KIND, ALPHA, DTYPE)
        if PARTIALS:
            product = y * grad
            if not WIDE_PROBS:
                product = rounded(product, DTYPE)
            product = tl.where(mask, product, 0.0)
            into = partials + n_tile.to(tl.int64) * wave_rows + tl.load(row + 4) + m0 + rm
            tl.store(into, tl.sum(product, axis=1), mask=in_m)
        if ACTIVATED:
            a_at = activated + block + n0 + (rm[:, None] * neurons + rn[None, :])
            tl.store(a_at, (y * p[:, None]).to(DTYPE), mask=mask)
    if PROBS:
        grad = rounded(grad * p[:, None], DTYPE)
    d_at = grad_pre + WIDE * block + n0 + at
    if GATED:
        grad_first, grad_second = gated_backward(first, second, grad, KIND, ALPHA, CLAMP, OFFSET, DTYPE)
        tl.store(d_at + neurons, grad_second.to(DTYPE), mask=mask)
    else:
        grad_first = act_backward(first, grad, KIND, ALPHA, DTYPE)
    tl.store(d_at, grad_first.to(DTYPE), mask=mask)


def launch_activation_backward(
    *,
    grad_y: torch.Tensor,
    index: torch.Tensor | None,
    probs: torch.Tensor | None,
    pre: torch.Tensor,
    activated: torch.Tensor | None,
    grad_pre: torch.Tensor,
    partials: torch.Tensor | None,
    wave: WaveTables,
    shape: PageShape,
    tile: TileConfig,
    debug: bool = False,
) -> None:
    """Fills ``grad_pre``, and ``activated`` and ``partials`` where given; see :func:`paged_activation_backward`.

    Raises ValueError for a tensor that does not fit.
    """
    device, floats = wave.items.device, (torch.float32, torch.bfloat16, torch.float16)
    wave.require_tiles("tile", tile.m)
    shape.require_offsets(wave, tile)
    tokens = wave.tokens if index is None else 0
    require("grad_y", grad_y, dtype=floats, device=device, shape=(None, shape.hidden), rows=tokens)
    if index is not None:
        require("index", index, dtype=(torch.int32, torch.int64), device=device, shape=(None,), rows=wave.tokens)
    require("pre", pre, dtype=grad_y.dtype, device=device, least=shape.wide * wave.flat)
    require("grad_pre", grad_pre, dtype=grad_y.dtype, device=device, least=shape.wide * wave.block)
    if probs is not None:
        require("probs", probs, dtype=floats, device=device, shape=(None,), rows=wave.tokens)
    if activated is not None:
        require("activated", activated, dtype=grad_y.dtype, device=device, least=wave.block)
    n_tiles = triton.cdiv(wave.neurons, tile.n)
    if partials is not None:
        require("partials", partials, dtype=torch.float32, device=device, shape=(n_tiles, wave.rows))
    if not wave.rows:
        return
    row_tiles = wave.tiles.shape[0]
    paged_activation_backward[(row_tiles * n_tiles,)](
        grad_y,
        index,
        probs,
        pre,
        activated,
        grad_pre,
        partials,
        wave.items,
        wave.tiles,
        shape.hidden,
        wave.rows,
        grad_y.shape[0],
        row_tiles,
        n_tiles,
        **shape.constants(),
        INDEX=index is not None,
        PROBS=probs is not None,
        ACTIVATED=activated is not None,
        PARTIALS=partials is not None,
        WIDE_PROBS=probs is not None and probs.dtype is torch.float32,
        DIVISIBLE=wave.divisible,
        PRECISION=precision_of(grad_y.dtype),
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        GROUP=GROUP,
        debug=debug,
        **tile.launch,
    )

"""First product of an expert, read through a table of pages, with the activation in its epilogue."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from megascale_omni.experts.activation import Activation
from megascale_omni.kernels.activations import act, gated, rounded
from megascale_omni.kernels.checks import require, require_offsets
from megascale_omni.kernels.segments import pointer_to
from megascale_omni.kernels.tiles import GROUP, TileConfig, tile_of
from megascale_omni.kernels.wave import ITEM_COLUMNS, WaveTables

COLUMNS = tl.constexpr(ITEM_COLUMNS)


@triton.jit
def neurons_of(row, DIVISIBLE: tl.constexpr):
    """Neurons of the page in a row of ``items``; DIVISIBLE says that those of all pages are multiples of 16."""
    neurons = tl.load(row + 6).to(tl.int32)
    if DIVISIBLE:
        neurons = tl.multiple_of(neurons, 16)
    return neurons


@triton.jit
def block_of(row, COLUMN: tl.constexpr, DIVISIBLE: tl.constexpr):
    """Where the page's block begins: column 3 in the pre-activations of all tokens, 5 in the wave."""
    block = tl.load(row + COLUMN)
    if DIVISIBLE:
        block = tl.multiple_of(block, 16)
    return block


@triton.jit
def source_of(index, first, rm, in_m, sources):
    """Which of ``sources`` rows each row of a tile is, and where there is one; debug builds trap where none is."""
    source = tl.load(index + first + rm, mask=in_m, other=0).to(tl.int64)
    known = (source >= 0) & (source < sources)
    tl.device_assert(known, "index: a row that does not exist is read")
    return source, in_m & known


@triton.jit(do_not_specialize=["sources", "row_tiles", "columns"], do_not_specialize_on_alignment=["items", "tiles"])
def paged_fc1(
    x,
    index,
    probs,
    pre,
    activated,
    items,
    tiles,
    hidden,
    sources,
    row_tiles,
    columns,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    CLAMP: tl.constexpr,
    OFFSET: tl.constexpr,
    BIAS: tl.constexpr,
    INDEX: tl.constexpr,
    PROBS: tl.constexpr,
    SAVE: tl.constexpr,
    DIVISIBLE: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Pre-activations and activations of every page of a wave.

    Formula: h = x[index] W1^T + b1;  a = act(h) * probs  (gated: h = gate | up, act(gate) * up).
    Shapes: x [sources, hidden], index [N] (rows of x; none: the rows themselves), probs [N], W1 [M' r, hidden] a page
        (M' = 2 gated, 1 not), h [n, M' r], a [n, r] for the n tokens of the page's expert. What the index says and
        ``x`` does not have is NaN.
    Layout: W1 is the head of a page, b1 follows the matrices; h goes to the page's block of the flat
        pre-activations, a to its block of the wave, both row-major. A program is one tile of n x r.
    """
    tile, n_tile = tile_of(tl.program_id(0), row_tiles, columns, GROUP)
    n0 = n_tile * BN
    item = tl.load(tiles + 2 * tile)
    m0 = tl.load(tiles + 2 * tile + 1)
    row = items + item * COLUMNS
    neurons = neurons_of(row, DIVISIBLE)
    if n0 >= neurons:
        return
    DTYPE: tl.constexpr = x.dtype.element_ty
    address = tl.load(row)
    tl.device_assert(address != 0, "a page that is not resident is read")
    page = pointer_to(address, DTYPE, True)
    rm, rn, rk = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    in_m, in_n = rm < tl.load(row + 2).to(tl.int32) - m0, rn < neurons - n0
    token = tl.load(row + 1) + m0
    in_x = in_m
    if INDEX:
        source, in_x = source_of(index, token, rm, in_m, sources)
        x_at = x + source[:, None] * hidden + rk[None, :]
    else:
        x_at = x + token * hidden + (rm[:, None] * hidden + rk[None, :])
    w_at = page + n0 * hidden + (rn[None, :] * hidden + rk[:, None])
    up_from = neurons * hidden
    first = tl.zeros((BM, BN), dtype=tl.float32)
    second = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, hidden, BK):
        in_k = rk < hidden - k
        a = tl.load(x_at + k, mask=in_x[:, None] & in_k[None, :], other=0.0)
        b_mask = in_k[:, None] & in_n[None, :]
        first = tl.dot(a, tl.load(w_at + k, mask=b_mask, other=0.0), first, input_precision=PRECISION)
        if GATED:
            b = tl.load(w_at + up_from + k, mask=b_mask, other=0.0)
            second = tl.dot(a, b, second, input_precision=PRECISION)
    WIDE: tl.constexpr = 2 if GATED else 1
    if INDEX:
        first = tl.where(in_x[:, None], first, float("nan"))
    first = rounded(first, DTYPE)
    second = rounded(second, DTYPE)
    if BIAS:
        bias = page + (WIDE + 1) * up_from + n0 + rn
        first = rounded(first + tl.load(bias, mask=in_n, other=0.0).to(tl.float32)[None, :], DTYPE)
        if GATED:
            second = rounded(second + tl.load(bias + neurons, mask=in_n, other=0.0).to(tl.float32)[None, :], DTYPE)
    mask = in_m[:, None] & in_n[None, :]
    if SAVE:
        h_from = pre + WIDE * (block_of(row, 3, DIVISIBLE) + m0.to(tl.int64) * neurons) + n0
        h_at = h_from + (rm[:, None] * (WIDE * neurons) + rn[None, :])
        tl.store(h_at, first.to(DTYPE), mask=mask)
        if GATED:
            tl.store(h_at + neurons, second.to(DTYPE), mask=mask)
    if GATED:
        y = gated(first, second, KIND, ALPHA, CLAMP, OFFSET, DTYPE)
    else:
        y = act(first, KIND, ALPHA, DTYPE)
    if PROBS:
        y = y * tl.load(probs + token + rm, mask=in_m, other=0.0).to(tl.float32)[:, None]
    a_from = activated + block_of(row, 5, DIVISIBLE) + m0.to(tl.int64) * neurons + n0
    tl.store(a_from + (rm[:, None] * neurons + rn[None, :]), y.to(DTYPE), mask=mask)


@dataclass(frozen=True)
class PageShape:
    """What all pages of a module have in common."""

    hidden: int
    activation: Activation
    bias: bool

    @property
    def wide(self) -> int:
        """Rows of the first product a neuron: 2 where gated, else 1."""
        return 2 if self.activation.gated else 1

    def require_offsets(self, wave: WaveTables, tile: TileConfig) -> None:
        """Refuses pages and tiles that are too large to count in 32 bits. Raises ValueError."""
        numel = (self.wide + 1) * wave.neurons * self.hidden + self.wide * wave.neurons + self.hidden
        longest = max(self.hidden, self.wide * wave.neurons)
        require_offsets("page", numel, max(tile.m, tile.n, tile.k) * longest)

    def constants(self) -> dict[str, object]:
        """The activation as constants of a kernel."""
        kind = self.activation
        return {
            "KIND": kind.kind,
            "GATED": kind.gated,
            "ALPHA": kind.alpha,
            "CLAMP": kind.clamp,
            "OFFSET": kind.offset,
        }


def precision_of(dtype: torch.dtype) -> str:
    """How fp32 operands are multiplied: as torch does, exactly unless TF32 is allowed."""
    return "tf32" if dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def launch_fc1(
    *,
    x: torch.Tensor,
    probs: torch.Tensor | None,
    index: torch.Tensor | None,
    pre: torch.Tensor | None,
    activated: torch.Tensor,
    wave: WaveTables,
    shape: PageShape,
    tile: TileConfig,
    debug: bool = False,
) -> None:
    """Fills ``pre`` (the flat pre-activations of all tokens; None where not kept) and ``activated`` (of the wave).

    See :func:`paged_fc1`. Raises ValueError for a tensor that does not fit.
    """
    device, floats = wave.items.device, (torch.float32, torch.bfloat16, torch.float16)
    wave.require_tiles("tile", tile.m)
    shape.require_offsets(wave, tile)
    tokens = wave.tokens if index is None else 0
    require("x", x, dtype=floats, device=device, shape=(None, shape.hidden), rows=tokens)
    require("activated", activated, dtype=x.dtype, device=device, least=wave.block)
    if pre is not None:
        require("pre", pre, dtype=x.dtype, device=device, least=shape.wide * wave.flat)
    if index is not None:
        require("index", index, dtype=(torch.int32, torch.int64), device=device, shape=(None,), rows=wave.tokens)
    if probs is not None:
        require("probs", probs, dtype=floats, device=device, shape=(None,), rows=wave.tokens)
    if not wave.rows:
        return
    row_tiles, columns = wave.tiles.shape[0], triton.cdiv(wave.neurons, tile.n)
    paged_fc1[(row_tiles * columns,)](
        x,
        index,
        probs,
        pre,
        activated,
        wave.items,
        wave.tiles,
        shape.hidden,
        x.shape[0],
        row_tiles,
        columns,
        **shape.constants(),
        BIAS=shape.bias,
        INDEX=index is not None,
        PROBS=probs is not None,
        SAVE=pre is not None,
        DIVISIBLE=wave.divisible,
        PRECISION=precision_of(x.dtype),
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        GROUP=GROUP,
        debug=debug,
        **tile.launch,
    )

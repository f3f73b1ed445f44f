"""Tokens to their experts and back: rows by index, and their weighted sums."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from megascale_omni.kernels.checks import require
from megascale_omni.kernels.segments import DTYPES

_FLOATS = tuple(DTYPES)
_INTS = (torch.int32, torch.int64)
BLOCK = 1024


@triton.jit
def row_of(index, rows):
    """A row's number, whether it is there, and what stands where it is not: 0 for -1, NaN for what is no row at all."""
    row = tl.load(index).to(tl.int64)
    known = (row >= -1) & (row < rows)
    tl.device_assert(known, "index: a row that does not exist is read")
    return row, (row >= 0) & known, tl.where(known, 0.0, float("nan"))


@triton.jit(do_not_specialize=["rows"])
def permute_rows(x, source, scale, out, rows, hidden, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows by index, scaled where asked for.

    Formula: out[i] = x[source[i]] * scale[i].
    Shapes: x [T, hidden] (T = ``rows``), source [N] (-1: a row of zeros), scale [N] (none: 1), out [N, hidden].
    Layout: row-major. Scaling is fp32, rounded once. A source that is no row gives NaN. A program is BLOCK columns of
        one row.
    """
    i = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, there, instead = row_of(source + i, rows)
    value = tl.load(x + row * hidden + at, mask=(at < hidden) & there, other=instead)
    if SCALE:
        value = (value.to(tl.float32) * tl.load(scale + i).to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + i * hidden + at, value, mask=at < hidden)


@triton.jit(do_not_specialize=["rows"])
def unpermute_rows(
    y,
    position,
    weight,
    out,
    rows,
    hidden,
    TOPK: tl.constexpr,
    WEIGHT: tl.constexpr,
    PRODUCT: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every token's rows, weighted and summed.

    Formula: out[t] = sum_k weight[t, k] y[position[t, k]].
    Shapes: y [N, hidden] (N = ``rows``), position [T, k] (-1: dropped), weight [T, k] (none: 1), out [T, hidden].
    Layout: row-major; products are rounded to PRODUCT; sums are fp32, k ascending, rounded once, or (EACH) products and
        every sum to out's dtype. A position that is no row gives NaN. A program is BLOCK columns of one token.
    """
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOPK):
        row, there, instead = row_of(position + t * TOPK + k, rows)
        value = tl.load(y + row * hidden + at, mask=(at < hidden) & there, other=instead).to(tl.float32)
        if WEIGHT:
            value = (value * tl.load(weight + t * TOPK + k).to(tl.float32)).to(PRODUCT).to(tl.float32)
        if EACH:
            value = value.to(out.dtype.element_ty).to(tl.float32)
        total += value
        if EACH:
            total = total.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + t * hidden + at, total.to(out.dtype.element_ty), mask=at < hidden)


@triton.jit(do_not_specialize=["rows"])
def row_products(y, position, grad, out, rows, hidden, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    """Gradient of the weights of :func:`unpermute_rows`.

    Formula: out[t, k] = sum over hidden of y[position[t, k]] grad[t]; 0 for a dropped row.
    Shapes: y [N, hidden] (N = ``rows``), position [T, k], grad [T, hidden], out fp32 [T, k].
    Layout: row-major; columns ascending in steps of BLOCK. A position that is no row gives NaN. A program is one
        (t, k).
    """
    t, k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, there, instead = row_of(position + t * TOPK + k, rows)
    total = tl.zeros((BLOCK,), dtype=tl.float32) + instead
    for start in range(0, hidden, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = (at < hidden) & there
        left = tl.load(y + row * hidden + at, mask=mask, other=0.0).to(tl.float32)
        total += left * tl.load(grad + t * hidden + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + t * TOPK + k, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["rows", "tokens"])
def sum_rows(y, order, bounds, out, rows, tokens, hidden, BLOCK: tl.constexpr):
    """Every token's rows summed, however many it has.

    Formula: out[t] = sum over i from bounds[t + 1] to bounds[t + 2] - 1 of y[order[i]].
    Shapes: y [N, hidden] (N = ``rows``), order int64 [N] (a permutation), bounds int64 [T + 2] (T = ``tokens``),
        out [T, hidden].
    Layout: row-major; sums are fp32, i ascending, rounded once. Rows before bounds[1] are of no token. Where bounds
        leave rows out all sums are NaN. A program is BLOCK columns of one token.
    """
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, count = tl.load(bounds + t + 1), tl.load(bounds + t + 2) - tl.load(bounds + t + 1)
    whole = (tl.load(bounds) == 0) & (tl.load(bounds + tokens + 1) == rows)
    tl.device_assert(whole, "index: a row is of a token that does not exist")
    total = tl.zeros((BLOCK,), dtype=tl.float32) + tl.where(whole, 0.0, float("nan"))
    for i in range(count.to(tl.int32)):
        row = tl.load(order + first + i)
        total += tl.load(y + row * hidden + at, mask=at < hidden, other=0.0).to(tl.float32)
    tl.store(out + t * hidden + at, total.to(out.dtype.element_ty), mask=at < hidden)


def permute(
    x: torch.Tensor, source: torch.Tensor, *, scale: torch.Tensor | None = None, debug: bool = False
) -> torch.Tensor:
    """``x[source] * scale`` as ``[N, hidden]``; see :func:`permute_rows`. Raises ValueError for what does not fit.

    ``debug`` traps where a source is no row of ``x`` (and not -1).
    """
    require("x", x, dtype=_FLOATS, device=x.device, shape=(None, None))
    require("source", source, dtype=_INTS, device=x.device, shape=(None,))
    rows, hidden = source.shape[0], x.shape[1]
    if scale is not None:
        require("scale", scale, dtype=_FLOATS, device=x.device, shape=(rows,))
    out = x.new_empty(rows, hidden)
    if out.numel():
        grid = (rows, triton.cdiv(hidden, BLOCK))
        options = {"SCALE": scale is not None, "BLOCK": BLOCK, "debug": debug}
        permute_rows[grid](x, source, scale, out, x.shape[0], hidden, **options)
    return out


def unpermute(
    y: torch.Tensor,
    position: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    each: bool = False,
    debug: bool = False,
) -> torch.Tensor:
    """Sums of every token's rows, ``[T, hidden]``; see :func:`unpermute_rows`. Raises ValueError, likewise.

    Products have the dtype that torch would give them; ``each``: every sum is rounded, as where rows come one by one.
    """
    require("y", y, dtype=_FLOATS, device=y.device, shape=(None, None))
    require("position", position, dtype=_INTS, device=y.device, shape=(None, None))
    tokens, hidden = position.shape[0], y.shape[1]
    if weight is not None:
        require("weight", weight, dtype=_FLOATS, device=y.device, shape=tuple(position.shape))
    out = y.new_empty(tokens, hidden)
    if out.numel():
        product = y.dtype if weight is None else torch.promote_types(y.dtype, weight.dtype)
        unpermute_rows[(tokens, triton.cdiv(hidden, BLOCK))](
            y, position, weight, out, y.shape[0], hidden,
            TOPK=position.shape[1], WEIGHT=weight is not None, PRODUCT=DTYPES[product], EACH=each, BLOCK=BLOCK,
            debug=debug, enable_fp_fusion=False,  # a product is rounded before it is added
        )  # fmt: skip
    return out


def weight_gradient(
    y: torch.Tensor, position: torch.Tensor, grad: torch.Tensor, *, debug: bool = False
) -> torch.Tensor:
    """Gradient of ``weight``, fp32 ``[T, k]``; see :func:`row_products`. Raises ValueError, likewise."""
    require("y", y, dtype=_FLOATS, device=y.device, shape=(None, None))
    require("position", position, dtype=_INTS, device=y.device, shape=(None, None))
    require("grad", grad, dtype=_FLOATS, device=y.device, shape=(position.shape[0], y.shape[1]))
    out = torch.empty(position.shape, dtype=torch.float32, device=y.device)
    if out.numel():
        row_products[tuple(position.shape)](
            y, position, grad, out, y.shape[0], y.shape[1], TOPK=position.shape[1], BLOCK=BLOCK, debug=debug
        )
    return out


def sum_by_token(y: torch.Tensor, index: torch.Tensor, tokens: int, *, debug: bool = False) -> torch.Tensor:
    """``[tokens, hidden]``: the sum of the rows ``y`` of each token; row ``n`` is of token ``index[n]``, -1 of none.

    In ascending order of rows, whatever ran first; see :func:`sum_rows`. Nothing waits for the device. Raises
    ValueError, likewise; where an index is no token, all sums are NaN, and ``debug`` traps.
    """
    require("y", y, dtype=_FLOATS, device=y.device, shape=(None, None))
    require("index", index, dtype=_INTS, device=y.device, shape=(y.shape[0],))
    if tokens < 0:
        raise ValueError(f"tokens: {tokens}, must not be negative")
    hidden, out = y.shape[1], y.new_empty(tokens, y.shape[1])
    if out.numel():
        sorted_index, order = torch.sort(index.long(), stable=True)
        bounds = torch.searchsorted(sorted_index, torch.arange(-1, tokens + 1, device=y.device))
        grid = (tokens, triton.cdiv(hidden, BLOCK))
        sum_rows[grid](y, order, bounds, out, y.shape[0], tokens, hidden, BLOCK=BLOCK, debug=debug)
    return out


def sum_segments(y: torch.Tensor, order: torch.Tensor, starts: torch.Tensor, *, debug: bool = False) -> torch.Tensor:
    """``[T, hidden]``: sum ``t`` is that of ``y[order[starts[t]:starts[t + 1]]]``, the last one of all that are left.

    In this order; see :func:`sum_rows`, whose docstring also says what ``order`` must be. Raises ValueError, likewise.
    """
    require("y", y, dtype=_FLOATS, device=y.device, shape=(None, None))
    require("order", order, dtype=torch.int64, device=y.device, shape=(y.shape[0],))
    require("starts", starts, dtype=torch.int64, device=y.device, shape=(None,))
    tokens, hidden = starts.shape[0], y.shape[1]
    out = y.new_empty(tokens, hidden)
    if out.numel():
        bounds = F.pad(F.pad(starts, (0, 1), value=y.shape[0]), (1, 0))
        grid = (tokens, triton.cdiv(hidden, BLOCK))
        sum_rows[grid](y, order, bounds, out, y.shape[0], tokens, hidden, BLOCK=BLOCK, debug=debug)
    return out

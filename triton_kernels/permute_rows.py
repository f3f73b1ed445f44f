"""Tokens to their experts and back: rows by index, and their weighted sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megascale_omni.kernels.checks import require

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTS = (torch.int32, torch.int64)
BLOCK = 1024


@triton.jit
def permute_rows(x, source, scale, out, hidden, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows by index, scaled where asked for.

    Formula: out[i] = x[source[i]] * scale[i].
    Shapes: x [T, hidden], source [N] (-1: a row of zeros), scale [N] (none: 1), out [N, hidden].
    Layout: row-major. Scaling is fp32, rounded once. A program is BLOCK columns of one row.
    """
    i = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(source + i).to(tl.int64)
    value = tl.load(x + row * hidden + at, mask=(at < hidden) & (row >= 0), other=0.0)
    if SCALE:
        value = (value.to(tl.float32) * tl.load(scale + i).to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + i * hidden + at, value, mask=at < hidden)


@triton.jit
def unpermute_rows(y, position, weight, out, hidden, TOPK: tl.constexpr, WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Every token's rows, weighted and summed.

    Formula: out[t] = sum_k weight[t, k] y[position[t, k]].
    Shapes: y [N, hidden], position [T, k] (-1: dropped), weight [T, k] (none: 1), out [T, hidden].
    Layout: row-major; sums are fp32, k ascending, rounded once. A program is BLOCK columns of one token.
    """
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOPK):
        row = tl.load(position + t * TOPK + k).to(tl.int64)
        value = tl.load(y + row * hidden + at, mask=(at < hidden) & (row >= 0), other=0.0).to(tl.float32)
        if WEIGHT:
            value = value * tl.load(weight + t * TOPK + k).to(tl.float32)
        total += value
    tl.store(out + t * hidden + at, total.to(out.dtype.element_ty), mask=at < hidden)


@triton.jit
def row_products(y, position, grad, out, hidden, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    """Gradient of the weights of :func:`unpermute_rows`.

    Formula: out[t, k] = sum over hidden of y[position[t, k]] grad[t]; 0 for a dropped row.
    Shapes: y [N, hidden], position [T, k], grad [T, hidden], out fp32 [T, k].
    Layout: row-major; columns ascending in steps of BLOCK. A program is one (t, k).
    """
    t, k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(position + t * TOPK + k).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, hidden, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = (at < hidden) & (row >= 0)
        left = tl.load(y + row * hidden + at, mask=mask, other=0.0).to(tl.float32)
        total += left * tl.load(grad + t * hidden + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + t * TOPK + k, tl.sum(total, axis=0))


def permute(x: torch.Tensor, source: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
    """``x[source] * scale`` as ``[N, hidden]``; see :func:`permute_rows`. Raises ValueError for what does not fit."""
    require("x", x, dtype=_FLOATS, device=x.device, shape=(None, None))
    require("source", source, dtype=_INTS, device=x.device, shape=(None,))
    rows, hidden = source.shape[0], x.shape[1]
    if scale is not None:
        require("scale", scale, dtype=_FLOATS, device=x.device, shape=(rows,))
    out = x.new_empty(rows, hidden)
    if out.numel():
        grid = (rows, triton.cdiv(hidden, BLOCK))
        permute_rows[grid](x, source, scale, out, hidden, SCALE=scale is not None, BLOCK=BLOCK)
    return out


def unpermute(y: torch.Tensor, position: torch.Tensor, *, weight: torch.Tensor | None = None) -> torch.Tensor:
    """Sums of every token's rows, ``[T, hidden]``; see :func:`unpermute_rows`. Raises ValueError, likewise."""
    require("y", y, dtype=_FLOATS, device=y.device, shape=(None, None))
    require("position", position, dtype=_INTS, device=y.device, shape=(None, None))
    tokens, hidden = position.shape[0], y.shape[1]
    if weight is not None:
        require("weight", weight, dtype=_FLOATS, device=y.device, shape=tuple(position.shape))
    out = y.new_empty(tokens, hidden)
    if out.numel():
        unpermute_rows[(tokens, triton.cdiv(hidden, BLOCK))](
            y, position, weight, out, hidden, TOPK=position.shape[1], WEIGHT=weight is not None, BLOCK=BLOCK
        )
    return out


def weight_gradient(y: torch.Tensor, position: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Gradient of ``weight``, fp32 ``[T, k]``; see :func:`row_products`. Raises ValueError, likewise."""
    require("y", y, dtype=_FLOATS, device=y.device, shape=(None, None))
    require("position", position, dtype=_INTS, device=y.device, shape=(None, None))
    require("grad", grad, dtype=_FLOATS, device=y.device, shape=(position.shape[0], y.shape[1]))
    out = torch.empty(position.shape, dtype=torch.float32, device=y.device)
    if out.numel():
        row_products[tuple(position.shape)](y, position, grad, out, y.shape[1], TOPK=position.shape[1], BLOCK=BLOCK)
    return out

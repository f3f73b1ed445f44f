"""The three matrix products of a page, behind one protocol.

Shape suffixes: n tokens of one expert, k the dimension that is summed over, m the other one. ``out`` always receives
the result; with ``accumulate`` it is added to what ``out`` holds.

[Note: products and rounding]
A page is one product per matrix. Where the result has the operands' dtype the product lands in ``out`` directly. Where
``out`` is wider (fp32 sums of bf16 products), the product is rounded once to the operands' dtype by the CPU's matrix
library, then added in fp32. What this adds to the rounding of stock's single product is, over any number of pages, at
most one rounding of a number as large as the sum of the partial products' magnitudes.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Protocol

import torch

from megascale_omni.config import ProductsChoice
from megascale_omni.experts.workspace import Workspace


class Products(Protocol):
    """``out (+)= a b^T``, ``a b`` and ``a^T b`` for 2-D operands of one dtype."""

    name: str

    def nt(self, a_nk: torch.Tensor, b_mk: torch.Tensor, *, out: torch.Tensor, accumulate: bool = False) -> None:
        """``out [n, m] (+)= a b^T``."""
        ...

    def nn(self, a_nk: torch.Tensor, b_km: torch.Tensor, *, out: torch.Tensor, accumulate: bool = False) -> None:
        """``out [n, m] (+)= a b``."""
        ...

    def tn(self, a_kn: torch.Tensor, b_km: torch.Tensor, *, out: torch.Tensor, accumulate: bool = False) -> None:
        """``out [n, m] (+)= a^T b``."""
        ...


class BlasProducts:
    """``torch.mm`` and ``addmm_``: what torch itself chooses for the device and dtype."""

    name = "blas"

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def nt(self, a_nk: torch.Tensor, b_mk: torch.Tensor, *, out: torch.Tensor, accumulate: bool = False) -> None:
        self._product(a_nk, b_mk.t(), out, accumulate)

    def nn(self, a_nk: torch.Tensor, b_km: torch.Tensor, *, out: torch.Tensor, accumulate: bool = False) -> None:
        self._product(a_nk, b_km, out, accumulate)

    def tn(self, a_kn: torch.Tensor, b_km: torch.Tensor, *, out: torch.Tensor, accumulate: bool = False) -> None:
        self._product(a_kn.t(), b_km, out, accumulate)

    def _product(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
        if a.dtype is torch.float32:
            if accumulate:
                out.addmm_(a, b)
            else:
                torch.mm(a, b, out=out)
            return
        if out.dtype is a.dtype and not accumulate:
            torch.mm(a, b, out=out)
            return
        # See [Note: products and rounding].
        partial = self._workspace.take("product", (a.shape[0], b.shape[1]), a.dtype)
        torch.mm(a, b, out=partial)
        if accumulate:
            out.add_(partial)
        else:
            out.copy_(partial)


ROW_QUANTUM = 32
ROW_BLOCK = 256
"""oneDNN compiles a kernel, about 0.65 MB each, for every number of rows: it gets multiples of the quantum up to a
block, and multiples of the block."""
_FEW_ROWS = 16
"""Up to here :class:`BlasProducts` are as fast."""


class OneDnnProducts(BlasProducts):
    """fp32 products through oneDNN's inner product, everything else as :class:`BlasProducts`.

    torch sends fp32 ``mm`` to MKL, which on processors of other vendors does not use their widest instructions:
    measured 200 against 430 GFLOP/s on two cores of an AVX-512 EPYC. oneDNN generates code for what the processor has.

    [Note: row quantum]
    Token counts differ at every call, and few row counts are to have a kernel. So a product takes whole blocks of rows
    where they are, and a copy of the rest in a buffer of a multiple of the quantum (what its other rows give is not
    used). Where tokens are what is summed over, both operands are copied with zeros behind them. Either way the result
    follows from the operands' shapes and values alone.
    """

    name = "onednn"

    def nt(self, a_nk: torch.Tensor, b_mk: torch.Tensor, *, out: torch.Tensor, accumulate: bool = False) -> None:
        if a_nk.dtype is torch.float32:
            self._rows(a_nk, b_mk, out, accumulate)
        else:
            self._product(a_nk, b_mk.t(), out, accumulate)

    def nn(self, a_nk: torch.Tensor, b_km: torch.Tensor, *, out: torch.Tensor, accumulate: bool = False) -> None:
        if a_nk.dtype is torch.float32:
            self._rows(a_nk, b_km.t(), out, accumulate)
        else:
            self._product(a_nk, b_km, out, accumulate)

    def tn(self, a_kn: torch.Tensor, b_km: torch.Tensor, *, out: torch.Tensor, accumulate: bool = False) -> None:
        k, n = a_kn.shape
        if a_kn.dtype is not torch.float32 or k < ROW_QUANTUM:
            self._product(a_kn.t(), b_km, out, accumulate)
            return
        padded = padded_rows(k)
        # A contiguous left operand is worth its copy: 447 against 211 GFLOP/s at 128 x 512 x 512.
        left_nk = self._workspace.take("left", (n, padded), a_kn.dtype)
        left_nk[:, :k].copy_(a_kn.t())
        right_km = b_km
        if padded > k:
            left_nk[:, k:].zero_()
            right_km = self._workspace.take("right", (padded, b_km.shape[1]), b_km.dtype)
            right_km[:k].copy_(b_km)
            right_km[k:].zero_()
        _put(_inner_product(left_nk, right_km.t()), out, accumulate)

    def _rows(self, a_nk: torch.Tensor, b_mk: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
        """``out (+)= a b^T``; see [Note: row quantum]."""
        n = a_nk.shape[0]
        whole = n // ROW_BLOCK * ROW_BLOCK
        if whole:
            _put(_inner_product(a_nk[:whole], b_mk), out[:whole], accumulate)
        if whole == n:
            return
        rest_nk, rest_out = (a_nk, out) if not whole else (a_nk[whole:], out[whole:])
        padded = padded_rows(n - whole)
        if n - whole <= _FEW_ROWS:
            self._product(rest_nk, b_mk.t(), rest_out, accumulate)
        elif padded == n - whole:
            _put(_inner_product(rest_nk, b_mk), rest_out, accumulate)
        else:
            padded_nk = self._workspace.take("rows", (padded, a_nk.shape[1]), a_nk.dtype)
            padded_nk[: n - whole].copy_(rest_nk)
            _put(_inner_product(padded_nk, b_mk)[: n - whole], rest_out, accumulate)


def padded_rows(rows: int) -> int:
    """The number of rows that a kernel is made for: the next multiple of the quantum, beyond a block of the block."""
    quantum = ROW_QUANTUM if rows <= ROW_BLOCK else ROW_BLOCK
    return -(-rows // quantum) * quantum


def _inner_product(a_nk: torch.Tensor, b_mk: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a_nk, b_mk, None, "none", [], "")
    return result


def _put(product: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    if accumulate:
        out.add_(product)
    else:
        out.copy_(product)


def onednn_available() -> bool:
    """Whether this torch build offers oneDNN's fp32 inner product."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def is_intel_cpu() -> bool:
    """Whether the processor is Intel's, where MKL is at its best. By name, so that equal machines choose alike."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        return "GenuineIntel" in cpuinfo.read_text(errors="replace")
    return "Intel" in platform.processor()


def products_for(*, device: torch.device, choice: ProductsChoice, workspace: Workspace) -> Products:
    """The products to use: one choice for a run, by device and processor and never by timing (sums stay reproducible).

    Raises:
        ValueError: ``onednn`` is asked for where it is not to be had.
    """
    usable = device.type == "cpu" and onednn_available()
    if choice == "onednn" and not usable:
        raise ValueError(
            f"products 'onednn' need a CPU and torch with oneDNN; the device is {device}: use 'auto' or 'blas'"
        )
    if choice == "onednn" or (choice == "auto" and usable and not is_intel_cpu()):
        return OneDnnProducts(workspace)
    return BlasProducts(workspace)

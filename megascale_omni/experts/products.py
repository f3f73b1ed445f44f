"""The three matrix products of a page, behind one protocol.

Shape suffixes: n tokens of one expert, k the dimension that is summed over, m the other one. ``out`` always receives
the result; with ``accumulate`` it is added to what ``out`` holds.

[Note: products and rounding]
A page is one product per matrix. Where the result has the operands' dtype the product lands in ``out`` directly. Where
``out`` is wider, it holds a sum of bf16 products in fp32, and there are two kinds. Slices of one product (``nn``) are
parts of a sum that stock does not cut: they are joined to one product, or added unrounded. Weight gradients (``tn``)
of several calls are products of their own in stock, which rounds each to the operands' dtype before it adds it: so do
we, unless ``rounded`` is False. On a CPU torch has no product of bf16 operands with an fp32 result; for an unrounded
one operands are copied to fp32, which loses nothing.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

from megascale_omni.config import ProductsChoice
from megascale_omni.experts.workspace import Workspace


class Products(Protocol):
    """``out (+)= a b^T``, ``a b`` and ``a^T b`` for 2-D operands of one dtype."""

    name: str

    def padded(self, rows: int, dtype: torch.dtype) -> int:
        """Rows that a product of ``rows`` rows ``nt`` or ``nn`` is best given, ``rows`` or more."""
        ...

    def nt(self, a_nk: torch.Tensor, b_mk: torch.Tensor, *, out: torch.Tensor, accumulate: bool = False) -> None:
        """``out [n, m] (+)= a b^T``."""
        ...

    def nn(self, a_nk: torch.Tensor, b_km: torch.Tensor, *, out: torch.Tensor, accumulate: bool = False) -> None:
        """``out [n, m] (+)= a b``."""
        ...

    def tn(
        self,
        a_kn: torch.Tensor,
        b_km: torch.Tensor,
        *,
        out: torch.Tensor,
        accumulate: bool = False,
        rounded: bool = True,
    ) -> None:
        """``out [n, m] (+)= a^T b``; ``rounded``: to the operands' dtype, before it is added to a wider ``out``."""
        ...


class BlasProducts:
    """``torch.mm`` and ``addmm_``: what torch itself chooses for the device and dtype."""

    name = "blas"

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def padded(self, rows: int, dtype: torch.dtype) -> int:
        return rows

    def nt(self, a_nk: torch.Tensor, b_mk: torch.Tensor, *, out: torch.Tensor, accumulate: bool = False) -> None:
        self._product(a_nk, b_mk.t(), out, accumulate)

    def nn(self, a_nk: torch.Tensor, b_km: torch.Tensor, *, out: torch.Tensor, accumulate: bool = False) -> None:
        if out.dtype is not a_nk.dtype:
            a_nk, b_km = self._widened("left.wide", a_nk, out.dtype), self._widened("right.wide", b_km, out.dtype)
        self._nn(a_nk, b_km, out, accumulate)

    def tn(
        self,
        a_kn: torch.Tensor,
        b_km: torch.Tensor,
        *,
        out: torch.Tensor,
        accumulate: bool = False,
        rounded: bool = True,
    ) -> None:
        if out.dtype is not a_kn.dtype and not rounded:
            a_kn, b_km = self._widened("left.wide", a_kn, out.dtype), self._widened("right.wide", b_km, out.dtype)
        self._tn(a_kn, b_km, out, accumulate)

    def _nn(self, a_nk: torch.Tensor, b_km: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
        self._product(a_nk, b_km, out, accumulate)

    def _tn(self, a_kn: torch.Tensor, b_km: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
        self._product(a_kn.t(), b_km, out, accumulate)

    def _widened(self, name: str, operand: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._workspace.take(name, tuple(operand.shape), dtype).copy_(operand)

    def _product(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
        if out.dtype is a.dtype and not accumulate:
            torch.mm(a, b, out=out)
        elif out.dtype is a.dtype and a.dtype is torch.float32:
            out.addmm_(a, b)
        else:  # see [Note: products and rounding]
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
    """fp32 products through oneDNN's matrix product, everything else as :class:`BlasProducts`.

    torch sends fp32 ``mm`` to MKL, which on processors of other vendors does not use their widest instructions:
    measured 190 against 370 GFLOP/s on two cores of an AVX-512 EPYC. oneDNN generates code for what the processor has.

    [Note: fp32 by oneDNN]
    torch hands an fp32 ``mm`` to oneDNN where a precision below fp32 is allowed for it. That allows oneDNN, but does
    not ask it, to convert operands; on processors without instructions for that it computes in fp32, and only there is
    this class used (see :func:`onednn_keeps_fp32`). The permission is given for the time of a call.

    [Note: row quantum]
    Token counts differ at every call, and few row counts are to have a kernel. So a product takes whole blocks of rows
    where they are, and a copy of the rest in a buffer of a multiple of the quantum (what its other rows give is not
    used), unless it is given as many rows as :meth:`padded` says. Where tokens are what is summed over, both operands
    are copied with zeros behind them. Either way the result follows from the operands' shapes and values alone.
    """

    name = "onednn"

    def padded(self, rows: int, dtype: torch.dtype) -> int:
        if dtype is not torch.float32 or rows <= _FEW_ROWS:
            return rows
        whole = rows // ROW_BLOCK * ROW_BLOCK
        return whole + -(-(rows - whole) // ROW_QUANTUM) * ROW_QUANTUM

    def nt(self, a_nk: torch.Tensor, b_mk: torch.Tensor, *, out: torch.Tensor, accumulate: bool = False) -> None:
        self._nn(a_nk, b_mk.t(), out, accumulate)

    def _nn(self, a_nk: torch.Tensor, b_km: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
        n = a_nk.shape[0]
        if a_nk.dtype is not torch.float32 or n <= _FEW_ROWS:
            self._product(a_nk, b_km, out, accumulate)
            return
        whole = n // ROW_BLOCK * ROW_BLOCK
        rest = n - whole
        with _OneDnnForFp32():
            if whole and rest:
                self._product(a_nk[:whole], b_km, out[:whole], accumulate)
                a_nk, out = a_nk[whole:], out[whole:]
            if rest % ROW_QUANTUM == 0:
                self._product(a_nk, b_km, out, accumulate)
            else:
                self._padded_product(a_nk, b_km, out, accumulate)

    def _padded_product(self, a_nk: torch.Tensor, b_km: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
        n = a_nk.shape[0]
        rows_nk = self._workspace.take("rows", (padded_rows(n), a_nk.shape[1]), a_nk.dtype)
        rows_nk[:n].copy_(a_nk)
        result_nm = self._workspace.take("result", (rows_nk.shape[0], b_km.shape[1]), a_nk.dtype)
        self._product(rows_nk, b_km, result_nm, accumulate=False)
        if accumulate:
            out.add_(result_nm[:n])
        else:
            out.copy_(result_nm[:n])

    def _tn(self, a_kn: torch.Tensor, b_km: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
        k = a_kn.shape[0]
        if a_kn.dtype is not torch.float32 or k <= _FEW_ROWS:
            self._product(a_kn.t(), b_km, out, accumulate)
            return
        padded = padded_rows(k)
        if padded > k:
            a_kn, b_km = self._zero_padded("left", a_kn, padded), self._zero_padded("right", b_km, padded)
        with _OneDnnForFp32():
            self._product(a_kn.t(), b_km, out, accumulate)

    def _zero_padded(self, name: str, rows: torch.Tensor, padded: int) -> torch.Tensor:
        copy = self._workspace.take(name, (padded, rows.shape[1]), rows.dtype)
        copy[: len(rows)].copy_(rows)
        copy[len(rows) :].zero_()
        return copy


def padded_rows(rows: int) -> int:
    """The number of rows that a kernel is made for: the next multiple of the quantum, beyond a block of the block."""
    quantum = ROW_QUANTUM if rows <= ROW_BLOCK else ROW_BLOCK
    return -(-rows // quantum) * quantum


class _OneDnnForFp32:
    """While it is open torch may give fp32 products to oneDNN; see [Note: fp32 by oneDNN]."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = _precision()
        _allow("bf16")

    def __exit__(self, *error: object) -> None:
        _allow(self._before)


def _precision() -> str:
    found: str = torch._C._get_fp32_precision_getter("mkldnn", "matmul")
    return found


def _allow(precision: str) -> None:
    torch._C._set_fp32_precision_setter("mkldnn", "matmul", precision)


@cache
def onednn_keeps_fp32() -> bool:
    """Whether torch computes fp32 products by oneDNN here where it may, and in fp32; found by computing some."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch._C, "_set_fp32_precision_setter"):
        return False
    left, right = (torch.linspace(1, 2, 256 * n).sin().view(n, 256) for n in (64, 256))

    def products() -> list[torch.Tensor]:
        return [torch.mm(left, right), torch.mm(left, right.t()), torch.mm(left.t(), left)]

    usual = products()
    with _OneDnnForFp32():
        found = products()
    left, right = left.double(), right.double()
    errors = [(a.double() - b).norm() / b.norm() for a, b in zip(found, products(), strict=True)]
    used = not all(a.equal(b) for a, b in zip(found, usual, strict=True))  # another library, another order of sums
    return used and all(float(error) < 1e-6 for error in errors)


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
    usable = device.type == "cpu" and onednn_keeps_fp32()
    if choice == "onednn" and not usable:
        raise ValueError(
            f"products 'onednn' need a CPU on which torch computes fp32 by oneDNN; the device is {device}: "
            "use 'auto' or 'blas'"
        )
    if choice == "onednn" or (choice == "auto" and usable and not is_intel_cpu()):
        return OneDnnProducts(workspace)
    return BlasProducts(workspace)

"""Waves computed by torch, page by page: the reference, and what a CPU runs.

Shape suffixes as in function.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megascale_omni.experts.rows import Blocks, ComingRows, Rows
from megascale_omni.experts.tokens import sum_rows
from megascale_omni.paging.layout import PageLayout, PageViews
from megascale_omni.paging.leases import Wave, WholeWave
from megascale_omni.paging.planes import Plane

if TYPE_CHECKING:
    from megascale_omni.experts.function import ExpertsContext


_JOINED_BYTES = 64 * 2**20
"""The largest weight matrix of an expert that is put together from its slices; as much as the largest page."""


class _SliceSum:
    """The sum over an expert's slices of ``[n, h]`` products, rounded once where the result is narrower than fp32.

    There, operands of slices are put side by side, so that all of an expert is one product, as in stock: over ``width``
    neurons, gate and up counted apart (see [Note: products and rounding]). Where its weights are too large for that, an
    fp32 sum takes the slices one by one. Products are wide (see [Note: wide products]) where they land in ``result``.
    """

    def __init__(
        self, context: ExpertsContext, name: str, result_Nh: torch.Tensor, rows: Rows, wide: _Wide, *, width: int
    ) -> None:
        self._products = context.products
        self._workspace = context.workspace
        self._name = name
        self._result_of = rows.split(result_Nh)
        self._slices = context.layout.num_slices
        self._direct = self._slices == 1 or result_Nh.dtype is torch.float32
        self._wide_of = wide.split(result_Nh, rows.starts) if self._direct else ()
        self._joined = width * result_Nh.shape[1] * result_Nh.element_size() <= _JOINED_BYTES
        self._width, self._filled = width, 0

    def add(self, expert: int, slice_: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds ``left @ right`` of one slice; slices of an expert come in ascending order and are not interleaved."""
        if self._direct:
            self._products.nn(left, right, out=self._wide_of[expert], accumulate=slice_ > 0)
            return
        result = self._result_of[expert]
        left = left[: result.shape[0]]
        if self._joined:
            self._join(result, slice_, left, right)
            return
        total = self._workspace.take(self._name, tuple(result.shape), torch.float32)
        self._products.nn(left, right, out=total, accumulate=slice_ > 0)
        if slice_ == self._slices - 1:
            result.copy_(total)  # rounded once

    def _join(self, result: torch.Tensor, slice_: int, left: torch.Tensor, right: torch.Tensor) -> None:
        if slice_ == 0:
            self._left_nk = self._workspace.take(f"{self._name}.left", (len(result), self._width), left.dtype)
            self._right_kh = self._workspace.take(f"{self._name}.right", (self._width, right.shape[1]), right.dtype)
            self._filled = 0
        count = len(right)
        self._left_nk.narrow(1, self._filled, count).copy_(left)
        self._right_kh.narrow(0, self._filled, count).copy_(right)
        self._filled += count
        if slice_ == self._slices - 1:
            self._products.nn(self._left_nk, self._right_kh, out=result)


class _Wide:
    """How many rows the products of each expert take; see [Note: wide products]."""

    def __init__(self, context: ExpertsContext, rows: Rows, dtype: torch.dtype) -> None:
        self.of = rows.wide(lambda n: context.products.padded(n, dtype))
        self._counts = rows.counts

    def beyond(self, items: Sequence[tuple[int, int]]) -> int:
        """Rows that the products of a batch take behind its last row, at most."""
        behind, most = 0, 0
        for expert, _ in reversed(items):
            most = max(most, self.of[expert] - self._counts[expert] - behind)
            behind += self._counts[expert]
        return most

    def split(self, matrix: torch.Tensor, starts: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """The rows that each expert's products take in a matrix, where the experts' rows begin at ``starts``."""
        return tuple(matrix[start : start + n] for start, n in zip(starts, self.of, strict=True))

    def split_batch(self, matrix: torch.Tensor, items: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """The same in the matrix of a batch: an item's rows follow those of the item before."""
        parts, start = [], 0
        for expert, _ in items:
            parts.append(matrix[start : start + self.of[expert]])
            start += self._counts[expert]
        return parts


def _batch_probs(
    items: Sequence[tuple[int, int]], rows: Rows, probs_N: torch.Tensor | None, num_slices: int
) -> torch.Tensor | None:
    """Probabilities of a batch's rows ``[B]``: a view where experts are one page, a copy where pages repeat tokens."""
    if probs_N is None:
        return None
    if num_slices == 1 or len(items) == 1:
        first, last = items[0][0], items[-1][0]
        return probs_N[rows.starts[first] : rows.starts[last] + rows.counts[last]]
    return torch.cat([probs_N[rows.starts[e] : rows.starts[e] + rows.counts[e]] for e, _ in items])


class _Forward:
    """One forward call in torch."""

    def __init__(
        self,
        context: ExpertsContext,
        rows: Rows,
        x_Nh: torch.Tensor,
        probs_N: torch.Tensor | None,
        *,
        flat: torch.Tensor,
        y_Nh: torch.Tensor,
    ) -> None:
        self._context, self._rows, self._probs_N, self._dtype = context, rows, probs_N, x_Nh.dtype
        self._wide = _Wide(context, rows, x_Nh.dtype)
        self._blocks = Blocks(context.layout, rows, flat)
        self._output = _SliceSum(context, "output", y_Nh, rows, self._wide, width=context.layout.shape.ffn)
        self._x_of = self._wide.split(x_Nh, rows.starts)
        self._y_of, self._probs_of = rows.split(y_Nh), rows.split(probs_N)
        self._down_bias_h: torch.Tensor | None = None

    def wave(self, wave: Wave | WholeWave) -> None:
        """Computes the pages of a wave."""
        assert isinstance(wave, Wave)
        context, items, weights = self._context, wave.items, wave.leases[Plane.WEIGHT]
        layout, work, counts = context.layout, context.workspace, self._rows.counts
        pages = [weights.views(expert, slice_) for expert, slice_ in items]
        wide, more = self._wide, self._wide.beyond(items)
        pre_BR = self._blocks.batch(items, more=more)
        num_rows = pre_BR.shape[0] - more
        for (expert, _), page, pre_nR in zip(items, pages, wide.split_batch(pre_BR, items), strict=True):
            context.products.nt(self._x_of[expert], page.fc1_Rh, out=pre_nR)
            if page.fc1_bias_R is not None:
                pre_nR[: counts[expert]].add_(page.fc1_bias_R)
        act_Br = work.take("activation", (pre_BR.shape[0], pages[0].down_rh.shape[0]), self._dtype)
        probs_B = _batch_probs(items, self._rows, self._probs_N, layout.num_slices)
        context.activation.with_probs_forward(pre_BR[:num_rows], probs_B, out=act_Br[:num_rows], workspace=work)
        act_of = wide.split_batch(act_Br, items)
        for (expert, slice_), page, act_nr in zip(items, pages, act_of, strict=True):
            self._output.add(expert, slice_, act_nr, page.down_rh)
            if page.down_bias_h is not None:
                # The page may be gone before the last slice is added.
                self._down_bias_h = page.down_bias_h.clone()
            if self._down_bias_h is not None and slice_ == layout.num_slices - 1:
                probs_n = self._probs_of[expert] if self._probs_of else None
                _add_down_bias(self._y_of[expert], self._down_bias_h, probs_n)


def _add_down_bias(y_nh: torch.Tensor, bias_h: torch.Tensor, probs_n: torch.Tensor | None) -> None:
    """``y += bias * p``: once an expert, after the whole sum, as stock does."""
    y_nh.add_(bias_h if probs_n is None else bias_h.unsqueeze(0) * probs_n.unsqueeze(-1))


class _WeightGradients:
    """Writes a page's gradients; the first write of a step stores, later ones add (no page is ever zeroed)."""

    def __init__(self, context: ExpertsContext) -> None:
        self._context = context

    def product(self, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor, store: bool) -> None:
        """``out (+)= left^T right``, the weight gradient of one product."""
        products = self._context.products
        if store or out.dtype is torch.float32:
            rounded = self._context.rounds_gradients
            products.tn(left, right, out=out, accumulate=not store, rounded=rounded)
        else:  # a bf16 gradient plane: stock rounds the product, then the sum
            partial = self._context.workspace.take("weight_gradient", tuple(out.shape), left.dtype)
            products.tn(left, right, out=partial)
            out.add_(partial)

    @staticmethod
    def vector(gradient: torch.Tensor, *, out: torch.Tensor, store: bool) -> None:
        """The same for a bias gradient."""
        if store:
            out.copy_(gradient)
        else:
            out.add_(gradient)


class _Backward:
    """One backward call in torch: gradients of tokens and probabilities out, weight gradients into pages."""

    def __init__(
        self,
        context: ExpertsContext,
        rows: Rows,
        saved: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
        gy_Nh: torch.Tensor,
        needs: tuple[bool, bool],
        *,
        gx_Nh: torch.Tensor | None,
    ) -> None:
        x_Nh, probs_N, flat = saved
        needs_probs, needs_weights = needs
        self.context, self.rows, self.probs_N = context, rows, probs_N
        self.blocks, self.wide = Blocks(context.layout, rows, flat), _Wide(context, rows, x_Nh.dtype)
        self.one_page = context.layout.num_slices == 1
        self.gprobs_N = None
        if needs_probs and probs_N is not None:
            # A sum over slices like the others (see _SliceSum): not in a dtype narrower than fp32.
            dtype = probs_N.dtype if self.one_page else torch.promote_types(probs_N.dtype, torch.float32)
            self.gprobs_N = torch.zeros_like(probs_N, dtype=dtype)
        wide_ffn = context.layout.shape.ffn * (2 if context.layout.shape.gated else 1)
        self.inputs = (
            None if gx_Nh is None else _SliceSum(context, "input_gradient", gx_Nh, rows, self.wide, width=wide_ffn)
        )
        self.weights = _WeightGradients(context) if needs_weights and rows.active else None
        self.x_of, self.gy_of = rows.split(x_Nh), rows.split(gy_Nh)
        self.wide_gy_of = self.wide.split(gy_Nh, rows.starts)
        self.probs_of, self.gprobs_of = rows.split(probs_N), rows.split(self.gprobs_N)
        self.dtype = x_Nh.dtype

    def wave(self, wave: Wave | WholeWave) -> None:
        """Computes the pages of a wave."""
        assert isinstance(wave, Wave)
        items, weights, gradients = wave.items, wave.leases[Plane.WEIGHT], wave.leases.get(Plane.GRADIENT)
        context, work, products = self.context, self.context.workspace, self.context.products
        pages = [weights.views(expert, slice_) for expert, slice_ in items]
        pre_BR = self.blocks.batch(items)
        num_rows, counts = pre_BR.shape[0], [self.rows.counts[expert] for expert, _ in items]
        with_more = num_rows + self.wide.beyond(items)
        neurons = pages[0].down_rh.shape[0]
        gact_Br = work.take("activation_gradient", (with_more, neurons), self.dtype)
        for (expert, _), page, gact_nr in zip(items, pages, self.wide.split_batch(gact_Br, items), strict=True):
            products.nt(self.wide_gy_of[expert], page.down_rh, out=gact_nr)
        act_Br = work.take("activation", (num_rows, neurons), self.dtype)
        gpre_BR = work.take("pre_activation_gradient", (with_more, pre_BR.shape[1]), self.dtype)
        probs_B = _batch_probs(items, self.rows, self.probs_N, context.layout.num_slices)
        _, gprobs_B = context.activation.with_probs_backward(
            pre_BR,
            probs_B,
            gact_Br[:num_rows],
            out=gpre_BR[:num_rows],
            activated=act_Br if gradients is not None else None,
            need_grad_probs=bool(self.gprobs_of),
            overwrite_grad=True,
            workspace=work,
        )
        if gradients is not None:
            parts = zip(items, act_Br.split(counts), gpre_BR[:num_rows].split(counts), strict=True)
            for (expert, slice_), act_nr, gpre_nR in parts:
                store = (expert, slice_) in wave.fresh
                self._weight_gradients(expert, gradients.views(expert, slice_), act_nr, gpre_nR, store=store)
            gradients.mark_dirty()
        if gprobs_B is not None:
            self._add_gprobs(items, pages, gprobs_B, counts)
        if self.inputs is not None:
            parts = zip(items, pages, self.wide.split_batch(gpre_BR, items), strict=True)
            for (expert, slice_), page, gpre_nR in parts:
                self.inputs.add(expert, slice_, gpre_nR, page.fc1_Rh)

    def _add_gprobs(
        self, items: Sequence[tuple[int, int]], pages: Sequence[PageViews], gprobs_B: torch.Tensor, counts: list[int]
    ) -> None:
        """Adds what a batch gives to the gradient of the probabilities, in the order of its items."""
        assert self.gprobs_N is not None
        if self.one_page:
            start = self.rows.starts[items[0][0]]
            self.gprobs_N[start : start + len(gprobs_B)].add_(gprobs_B)
            gprobs_of: Sequence[torch.Tensor | None] = [None] * len(items)
        else:
            gprobs_of = gprobs_B.split(counts)
        for (expert, _), page, gprobs_n in zip(items, pages, gprobs_of, strict=True):
            if gprobs_n is not None:
                self.gprobs_of[expert].add_(gprobs_n)
            if page.down_bias_h is not None:
                gy_nh = self.gy_of[expert].to(gprobs_B.dtype)  # stock adds bias * p in the dtype of p, if wider
                self.gprobs_of[expert].add_((gy_nh * page.down_bias_h).sum(-1))

    def _weight_gradients(
        self, expert: int, page: PageViews, act_nr: torch.Tensor, gpre_nR: torch.Tensor, *, store: bool
    ) -> None:
        """Adds the gradients of one page (``page`` are views of its gradient page)."""
        weights = self.weights
        assert weights is not None
        gy_nh = self.gy_of[expert]
        weights.product(act_nr, gy_nh, out=page.down_rh, store=store)
        weights.product(gpre_nR, self.x_of[expert], out=page.fc1_Rh, store=store)
        if page.fc1_bias_R is not None:
            weights.vector(self.context.bias_sum(gpre_nR), out=page.fc1_bias_R, store=store)
        if page.down_bias_h is not None:
            scaled = gy_nh * self.probs_of[expert].unsqueeze(-1) if self.probs_of else gy_nh
            total_h = self.context.bias_sum(scaled, rounded_to=self.dtype)
            weights.vector(total_h, out=page.down_bias_h, store=store)


class TorchBackend:
    """Waves computed by torch; see :class:`megascale_omni.experts.backends.Backend`."""

    name = "torch"
    by_index = False

    def schedules(self, layout: PageLayout) -> bool:
        """See the protocol: torch's products take numbers of rows from the host."""
        return False

    def forward(
        self,
        context: ExpertsContext,
        rows: Rows | ComingRows,
        x_Nh: torch.Tensor,
        probs_N: torch.Tensor | None,
        *,
        flat: torch.Tensor,
        y_Nh: torch.Tensor,
        index_N: torch.Tensor | None = None,
    ) -> _Forward:
        """See the protocol."""
        assert index_N is None
        assert isinstance(rows, Rows)
        return _Forward(context, rows, x_Nh, probs_N, flat=flat, y_Nh=y_Nh)

    def backward(
        self,
        context: ExpertsContext,
        rows: Rows | ComingRows,
        saved: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
        gy_Nh: torch.Tensor,
        needs: tuple[bool, bool],
        *,
        gx_Nh: torch.Tensor | None,
        index_N: torch.Tensor | None = None,
    ) -> _Backward:
        """See the protocol."""
        assert index_N is None
        assert isinstance(rows, Rows)
        return _Backward(context, rows, saved, gy_Nh, needs, gx_Nh=gx_Nh)

    def sum_rows(self, rows_Nh: torch.Tensor, index_N: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """See the protocol."""
        return sum_rows(rows_Nh, index_N, num_tokens)

    def measures(self, gradient: torch.Tensor) -> bool:
        """See the protocol."""
        return False

    def statistics(self, gradient: torch.Tensor) -> torch.Tensor:
        """See the protocol."""
        raise RuntimeError("torch's operators measure gradients where their numbers are wanted")

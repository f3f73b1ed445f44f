"""Forward and backward of one module's experts, page by page, as one autograd node.

Shape suffixes: N tokens of all local experts (sorted by expert), n tokens of one expert, B rows of a batch, h hidden
size, r neurons of a page, R = (M - 1) * r rows of a page's first product (M = 3 gated, 2 ungated).

[Note: order of sums]
Every floating-point sum has an order fixed by (module, expert, slice, token): slices are added in ascending order,
starting from slice 0's product, whatever wave a slice came in. Budgets, prefetch and the order of arrival cannot
change a bit.

[Note: batches]
Products are made page by page; what is done element by element is done once for a *batch* of consecutive pages,
because one small expert does not keep several cores busy. How pages are batched follows from the layout and the
routing alone (see ``cut_batches``), never from what is resident: vectorised loops round their tails differently, so
that a batch cut by a budget would change bits. A wave is one batch.

[Note: what is saved]
The forward keeps the tokens, their probabilities and the pre-activations; activations are recomputed in the backward.
The pre-activations of (expert, slice) are one contiguous block ``[n, R]`` of a flat buffer in (expert, slice) order,
so that products write straight into it and a batch is one matrix. Nothing refers to a page between forward and
backward: weight pages may come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from megascale_omni.experts.activation import Activation
from megascale_omni.experts.backends import Backend
from megascale_omni.experts.completion import Completion
from megascale_omni.experts.products import Products
from megascale_omni.experts.workspace import Workspace
from megascale_omni.paging.layout import PageLayout, PageViews
from megascale_omni.paging.leases import PagedModule, Wave
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.planes import Plane
from megascale_omni.schedule import Phase


@dataclass(frozen=True)
class ExpertsContext:
    """What a module's products need besides tensors; one for the life of the module."""

    manager: ExpertManager
    module: PagedModule
    activation: Activation
    products: Products
    workspace: Workspace
    backend: Backend
    completion: Completion = field(default_factory=Completion)

    @property
    def layout(self) -> PageLayout:
        """The module's page layout."""
        return self.module.layout


@dataclass(frozen=True)
class Rows:
    """Which rows belong to which expert: ``counts[e]`` tokens each, in ascending order of experts."""

    counts: tuple[int, ...]
    starts: tuple[int, ...]
    active: tuple[int, ...]

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> Rows:
        """Rows of ``counts`` tokens an expert."""
        starts = (0, *accumulate(counts))
        return cls(tuple(counts), starts[:-1], tuple(e for e, n in enumerate(counts) if n))

    def of(self, expert: int) -> slice:
        """The rows of an expert."""
        return slice(self.starts[expert], self.starts[expert] + self.counts[expert])

    def split(self, tensor: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """The rows of every expert as views; nothing for None."""
        return () if tensor is None else tensor.split(self.counts)


class _Blocks:
    """The flat buffer of pre-activations as blocks (see [Note: what is saved])."""

    def __init__(self, layout: PageLayout, rows: Rows, flat: torch.Tensor) -> None:
        self._layout = layout
        self._rows = rows
        self._flat = flat
        self._wide = layout.shape.num_matrices - 1

    @staticmethod
    def numel(layout: PageLayout, num_tokens: int) -> int:
        """Elements for ``num_tokens`` tokens."""
        return num_tokens * (layout.shape.num_matrices - 1) * layout.shape.ffn

    def batch(self, items: Sequence[tuple[int, int]]) -> torch.Tensor:
        """The blocks of consecutive pages of one width as one matrix ``[B, R]``."""
        expert, slice_ = items[0]
        width = self._wide * self._layout.rows_of(slice_)
        before = self._rows.starts[expert] * self._layout.shape.ffn
        start = self._wide * (before + self._rows.counts[expert] * self._layout.rows * slice_)
        total = sum(self._rows.counts[e] for e, _ in items)
        return self._flat[start : start + total * width].view(total, width)


class _SliceSum:
    """The sum over an expert's slices of ``[n, h]`` products, in fp32 where slices are summed in a narrower dtype."""

    def __init__(self, context: ExpertsContext, name: str, result_Nh: torch.Tensor, rows: Rows) -> None:
        self._products = context.products
        self._workspace = context.workspace
        self._name = name
        self._rows = rows.split(result_Nh)
        self._last = context.layout.num_slices - 1
        self._direct = self._last == 0 or result_Nh.dtype is torch.float32

    def add(self, expert: int, slice_: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds ``left @ right`` of one slice; slices of an expert come in ascending order and are not interleaved."""
        result = self._rows[expert]
        if self._direct:
            self._products.nn(left, right, out=result, accumulate=slice_ > 0)
            return
        total = self._workspace.take(self._name, tuple(result.shape), torch.float32)
        self._products.nn(left, right, out=total, accumulate=slice_ > 0)
        if slice_ == self._last:
            result.copy_(total)


def _batch_probs(
    items: Sequence[tuple[int, int]], rows: Rows, probs_N: torch.Tensor | None, num_slices: int
) -> torch.Tensor | None:
    """Probabilities of a batch's rows ``[B]``: a view where experts are one page, a copy where pages repeat tokens."""
    if probs_N is None:
        return None
    if num_slices == 1:
        first, last = items[0][0], items[-1][0]
        return probs_N[rows.starts[first] : rows.starts[last] + rows.counts[last]]
    return torch.cat([probs_N[rows.starts[e] : rows.starts[e] + rows.counts[e]] for e, _ in items])


def _forward(
    context: ExpertsContext, rows: Rows, x_Nh: torch.Tensor, probs_N: torch.Tensor | None, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs all waves; returns the output ``[N, h]`` and the flat pre-activations (in the workspace unless ``keep``)."""
    y_Nh = torch.empty_like(x_Nh)
    numel = _Blocks.numel(context.layout, x_Nh.shape[0])
    flat = x_Nh.new_empty(numel) if keep else context.workspace.take("pre_activations", (numel,), x_Nh.dtype)
    call = context.backend.forward(context, rows, x_Nh, probs_N, flat=flat, y_Nh=y_Nh)
    phase = _forward_phase(keep)
    if phase is Phase.FORWARD:
        context.manager.routed(context.module, rows.counts)
    for wave in context.manager.waves(context.module, rows.active, planes=(Plane.WEIGHT,), phase=phase):
        call.wave(wave)
    return y_Nh, flat


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
        self._blocks, self._output = _Blocks(context.layout, rows, flat), _SliceSum(context, "output", y_Nh, rows)
        self._x_of, self._y_of, self._probs_of = rows.split(x_Nh), rows.split(y_Nh), rows.split(probs_N)
        self._down_bias_h: torch.Tensor | None = None

    def wave(self, wave: Wave) -> None:
        """Computes the pages of a wave."""
        context, items, weights = self._context, wave.items, wave.leases[Plane.WEIGHT]
        layout, work, counts = context.layout, context.workspace, self._rows.counts
        pages = [weights.views(expert, slice_) for expert, slice_ in items]
        pre_BR = self._blocks.batch(items)
        pre_of = pre_BR.split([counts[expert] for expert, _ in items])
        for (expert, _), page, pre_nR in zip(items, pages, pre_of, strict=True):
            context.products.nt(self._x_of[expert], page.fc1_Rh, out=pre_nR)
            if page.fc1_bias_R is not None:
                pre_nR.add_(page.fc1_bias_R)
        act_Br = work.take("activation", (pre_BR.shape[0], pages[0].down_rh.shape[0]), self._dtype)
        probs_B = _batch_probs(items, self._rows, self._probs_N, layout.num_slices)
        context.activation.with_probs_forward(pre_BR, probs_B, out=act_Br, workspace=work)
        act_of = act_Br.split([counts[expert] for expert, _ in items])
        for (expert, slice_), page, act_nr in zip(items, pages, act_of, strict=True):
            self._output.add(expert, slice_, act_nr, page.down_rh)
            if page.down_bias_h is not None:
                # The page may be gone before the last slice is added.
                self._down_bias_h = page.down_bias_h.clone()
            if self._down_bias_h is not None and slice_ == layout.num_slices - 1:
                probs_n = self._probs_of[expert] if self._probs_of else None
                _add_down_bias(self._y_of[expert], self._down_bias_h, probs_n)


def _forward_phase(keep: bool) -> Phase:
    """Which phase a forward call belongs to, as autograd tells: recompute runs inside a backward."""
    if torch._C._current_graph_task_id() != -1:
        return Phase.RECOMPUTE
    return Phase.FORWARD if keep or torch.is_grad_enabled() else Phase.EVAL


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
            products.tn(left, right, out=out, accumulate=not store)
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
        needs: tuple[bool, bool, bool],
    ) -> None:
        x_Nh, probs_N, flat = saved
        needs_x, needs_probs, needs_weights = needs
        self.context, self.rows, self.probs_N = context, rows, probs_N
        self.blocks = _Blocks(context.layout, rows, flat)
        self.gx_Nh = torch.empty_like(x_Nh) if needs_x else None
        self.gprobs_N = None
        if needs_probs and probs_N is not None:
            # A sum over slices like the others (see _SliceSum): not in a dtype narrower than fp32.
            one_page = context.layout.num_slices == 1
            dtype = probs_N.dtype if one_page else torch.promote_types(probs_N.dtype, torch.float32)
            self.gprobs_N = torch.zeros_like(probs_N, dtype=dtype)
        self.inputs = None if self.gx_Nh is None else _SliceSum(context, "input_gradient", self.gx_Nh, rows)
        self.weights = _WeightGradients(context) if needs_weights and rows.active else None
        self.x_of, self.gy_of = rows.split(x_Nh), rows.split(gy_Nh)
        self.probs_of, self.gprobs_of = rows.split(probs_N), rows.split(self.gprobs_N)
        self.dtype = x_Nh.dtype

    def wave(self, wave: Wave) -> None:
        """Computes the pages of a wave."""
        items, weights, gradients = wave.items, wave.leases[Plane.WEIGHT], wave.leases.get(Plane.GRADIENT)
        context, work, products = self.context, self.context.workspace, self.context.products
        pages = [weights.views(expert, slice_) for expert, slice_ in items]
        pre_BR = self.blocks.batch(items)
        counts = [self.rows.counts[expert] for expert, _ in items]
        shape = (pre_BR.shape[0], pages[0].down_rh.shape[0])
        gact_Br = work.take("activation_gradient", shape, self.dtype)
        for (expert, _), page, gact_nr in zip(items, pages, gact_Br.split(counts), strict=True):
            products.nt(self.gy_of[expert], page.down_rh, out=gact_nr)
        act_Br = work.take("activation", shape, self.dtype)
        gpre_BR = work.take("pre_activation_gradient", tuple(pre_BR.shape), self.dtype)
        probs_B = _batch_probs(items, self.rows, self.probs_N, context.layout.num_slices)
        _, gprobs_B = context.activation.with_probs_backward(
            pre_BR,
            probs_B,
            gact_Br,
            out=gpre_BR,
            activated=act_Br if gradients is not None else None,
            need_grad_probs=bool(self.gprobs_of),
            overwrite_grad=True,
            workspace=work,
        )
        act_of, gpre_of = act_Br.split(counts), gpre_BR.split(counts)
        if gradients is not None:
            for (expert, slice_), act_nr, gpre_nR in zip(items, act_of, gpre_of, strict=True):
                store = (expert, slice_) in wave.fresh
                self._weight_gradients(expert, gradients.views(expert, slice_), act_nr, gpre_nR, store=store)
            gradients.mark_dirty()
        if self.gprobs_of:
            assert gprobs_B is not None
            for (expert, _), page, gprobs_n in zip(items, pages, gprobs_B.split(counts), strict=True):
                self.gprobs_of[expert].add_(gprobs_n)
                if page.down_bias_h is not None:
                    gy_nh = self.gy_of[expert].to(gprobs_n.dtype)  # stock adds bias * p in the dtype of p, if wider
                    self.gprobs_of[expert].add_((gy_nh * page.down_bias_h).sum(-1))
        if self.inputs is not None:
            for (expert, slice_), page, gpre_nR in zip(items, pages, gpre_of, strict=True):
                self.inputs.add(expert, slice_, gpre_nR, page.fc1_Rh)

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
            weights.vector(gpre_nR.sum(0), out=page.fc1_bias_R, store=store)
        if page.down_bias_h is not None:
            scaled = gy_nh * self.probs_of[expert].unsqueeze(-1) if self.probs_of else gy_nh
            weights.vector(scaled.sum(0).to(self.dtype), out=page.down_bias_h, store=store)


class TorchBackend:
    """Waves computed by torch; see :class:`megascale_omni.experts.backends.Backend`."""

    name = "torch"

    def forward(
        self,
        context: ExpertsContext,
        rows: Rows,
        x_Nh: torch.Tensor,
        probs_N: torch.Tensor | None,
        *,
        flat: torch.Tensor,
        y_Nh: torch.Tensor,
    ) -> _Forward:
        """See the protocol."""
        return _Forward(context, rows, x_Nh, probs_N, flat=flat, y_Nh=y_Nh)

    def backward(
        self,
        context: ExpertsContext,
        rows: Rows,
        saved: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
        gy_Nh: torch.Tensor,
        needs: tuple[bool, bool, bool],
    ) -> _Backward:
        """See the protocol."""
        return _Backward(context, rows, saved, gy_Nh, needs)


class PagedExpertsFunction(torch.autograd.Function):
    """``(x [N, h], probs [N] or None, anchor) -> y [N, h]``.

    ``anchor`` is a leaf that requires gradients when the weights do; it keeps the backward alive under frozen inputs.
    Weight gradients do not travel through autograd: they are added to gradient pages.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx,
        x_Nh: torch.Tensor,
        probs_N: torch.Tensor | None,
        anchor: torch.Tensor,
        context: ExpertsContext,
        rows: Rows,
        keep: bool,
    ) -> torch.Tensor:
        x_Nh = x_Nh.contiguous()
        y_Nh, flat = _forward(context, rows, x_Nh, probs_N, keep)
        if keep:
            ctx.save_for_backward(x_Nh, probs_N, flat)  # type: ignore[arg-type]
            ctx.context, ctx.rows = context, rows  # type: ignore[attr-defined]
        return y_Nh

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, gy_Nh: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x_Nh, probs_N, flat = ctx.saved_tensors  # type: ignore[attr-defined]
        context, rows = ctx.context, ctx.rows  # type: ignore[attr-defined]
        needs = ctx.needs_input_grad[:3]  # type: ignore[attr-defined]
        call = context.backend.backward(context, rows, (x_Nh, probs_N, flat), gy_Nh.contiguous(), needs)
        planes, create = ((Plane.WEIGHT, Plane.GRADIENT), Plane.GRADIENT) if needs[2] else ((Plane.WEIGHT,), None)
        finisher = context.completion.begin(rows.active) if needs[2] else None
        soon = () if finisher is None else finisher.planes
        for wave in context.manager.waves(
            context.module, rows.active, planes=planes, phase=Phase.BACKWARD, create=create, soon=soon
        ):
            call.wave(wave)
            if finisher is not None:
                finisher.wave(wave)
        anchor_gradient = gy_Nh.new_zeros(()) if needs[2] else None
        gprobs_N = None if call.gprobs_N is None else call.gprobs_N.to(probs_N.dtype)
        return call.gx_Nh, gprobs_N, anchor_gradient, None, None, None

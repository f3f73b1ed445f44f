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

The buffer is lent by the workspace and given back at the end of the backward. A graph that is kept (``retain_graph``)
may be walked again until another forward has borrowed the buffer; then autograd refuses, because it sees that what was
saved has been written to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megascale_omni.experts.activation import Activation
from megascale_omni.experts.backends import Backend
from megascale_omni.experts.completion import Completion
from megascale_omni.experts.products import Products
from megascale_omni.experts.rows import Blocks, ComingRows, Rows
from megascale_omni.experts.tokens import Index, Segments, gather_rows, of_row, room_for_rows, segment_sum
from megascale_omni.experts.workspace import Workspace
from megascale_omni.paging.layout import PageLayout
from megascale_omni.paging.leases import PagedModule, Wave, WholeWave
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.planes import Plane
from megascale_omni.schedule import Phase, Schedule


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
    rounds_gradients: bool = True
    """Whether a call's weight gradients are rounded to the weights' dtype before they are added to gradient pages, as
    stock rounds them; without it they are parts of a gradient that is rounded elsewhere."""

    @property
    def layout(self) -> PageLayout:
        """The module's page layout."""
        return self.module.layout

    def given_rows(self, x: torch.Tensor, index_N: torch.Tensor | None, name: str) -> torch.Tensor:
        """What the backend computes with: rows ``[N, h]`` (scratch under ``name``), or the tokens ``x`` themselves."""
        return x if self.backend.by_index else gather_rows(x, index_N, self.workspace, name)

    def given_index(self, index_N: torch.Tensor | None) -> torch.Tensor | None:
        """The index that the backend reads tokens by; None where it is given rows."""
        return index_N if self.backend.by_index else None

    def waves(
        self,
        rows: Rows | ComingRows,
        *,
        planes: Sequence[Plane],
        phase: Phase,
        create: Plane | None = None,
        soon: Sequence[Plane] = (),
    ) -> Iterator[Wave | WholeWave]:
        """The waves of a call: pages of the experts that have rows, or all at once where only the device knows."""
        if isinstance(rows, ComingRows):
            return self.manager.whole.waves(
                self.module, rows.coming, num_rows=rows.num_rows, planes=planes, phase=phase, create=create
            )
        if phase is Phase.FORWARD:
            self.manager.routed(self.module, rows.counts)
        return self.manager.waves(self.module, rows.active, planes=planes, phase=phase, create=create, soon=soon)

    def sums(self, rows_Nh: torch.Tensor, index_N: torch.Tensor | None, num_tokens: int) -> torch.Tensor:
        """The sum ``[T, h]`` of each token's rows; the rows themselves without an index."""
        return rows_Nh if index_N is None else self.backend.sum_rows(rows_Nh, index_N, num_tokens)

    def bias_sum(self, gradient_nk: torch.Tensor, *, rounded_to: torch.dtype | None = None) -> torch.Tensor:
        """``[k]``: the gradient of a bias, a sum over tokens."""
        if not self.rounds_gradients:
            return gradient_nk.sum(0, dtype=torch.float32)
        total = gradient_nk.sum(0)
        return total if rounded_to is None else total.to(rounded_to)


def _forward(
    context: ExpertsContext,
    rows: Rows | ComingRows,
    x: torch.Tensor,
    probs_N: torch.Tensor | None,
    *,
    index_N: torch.Tensor | None,
    flat: torch.Tensor,
    y_Nh: torch.Tensor,
    phase: Phase,
) -> None:
    """Runs all waves, which fill ``y`` and ``flat``, the pre-activations."""
    x, index_N = context.given_rows(x, index_N, "rows.tokens"), context.given_index(index_N)
    call = context.backend.forward(context, rows, x, probs_N, flat=flat, y_Nh=y_Nh, index_N=index_N)
    for wave in context.waves(rows, planes=(Plane.WEIGHT,), phase=phase):
        call.wave(wave)


def forward_phase(keep: bool, schedule: Schedule) -> Phase:
    """Which phase a forward call belongs to, as autograd tells: recompute runs inside a backward.

    A forward without a graph is an evaluation, unless a training forward is announced: then it is under a checkpoint,
    and its graph is made when it is recomputed.
    """
    if torch._C._current_graph_task_id() != -1:
        return Phase.RECOMPUTE
    trains = keep or torch.is_grad_enabled() or schedule.moment.phase is Phase.FORWARD
    return Phase.FORWARD if trains else Phase.EVAL


class PagedExpertsFunction(torch.autograd.Function):
    """``(x [N, h], probs [N] or None, anchor) -> y [N, h]``; with ``index`` (see tokens.py) ``x [T, h] -> y [T, h]``.

    ``anchor`` is a leaf that requires gradients when the weights do; it keeps the backward alive under frozen inputs.
    Weight gradients do not travel through autograd: they are added to gradient pages.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx,
        x: torch.Tensor,
        probs_N: torch.Tensor | None,
        anchor: torch.Tensor,
        context: ExpertsContext,
        rows: Rows | ComingRows,
        index: Index | None,
        keep: bool,
    ) -> torch.Tensor:
        x, work, index_N = x.contiguous(), context.workspace, of_row(index)
        y_Nh = room_for_rows(x, index_N, work, "rows.results")
        numel = Blocks.numel(context.layout, y_Nh.shape[0])
        room = work.lend(numel, x.dtype) if keep else work.take("pre_activations", (numel,), x.dtype)
        flat = room[:numel]
        phase = forward_phase(keep, context.manager.schedule)
        _forward(context, rows, x, probs_N, index_N=index_N, flat=flat, y_Nh=y_Nh, phase=phase)
        if keep:
            ctx.save_for_backward(x, probs_N, flat, index_N)  # type: ignore[arg-type]
            ctx.context, ctx.rows, ctx.room = context, rows, room  # type: ignore[attr-defined]
            ctx.order = index if isinstance(index, Segments) else None  # type: ignore[attr-defined]
        return segment_sum(y_Nh, index) if isinstance(index, Segments) else context.sums(y_Nh, index_N, x.shape[0])

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, gy: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, probs_N, flat, index_N = ctx.saved_tensors  # type: ignore[attr-defined]
        context, rows = ctx.context, ctx.rows  # type: ignore[attr-defined]
        needs_x, needs_probs, needs_weights = ctx.needs_input_grad[:3]  # type: ignore[attr-defined]
        work, gy = context.workspace, gy.contiguous()
        given = context.given_rows(x, index_N, "rows.tokens"), context.given_rows(gy, index_N, "rows.gradients")
        gx_Nh = room_for_rows(x, index_N, work, "rows.results") if needs_x else None
        saved, needs, by_index = (given[0], probs_N, flat), (needs_probs, needs_weights), context.given_index(index_N)
        call = context.backend.backward(context, rows, saved, given[1], needs, gx_Nh=gx_Nh, index_N=by_index)
        planes, create = ((Plane.WEIGHT, Plane.GRADIENT), Plane.GRADIENT) if needs_weights else ((Plane.WEIGHT,), None)
        if needs_weights:
            context.completion.check()
        finisher = context.completion.begin(rows.active) if needs_weights and isinstance(rows, Rows) else None
        soon = () if finisher is None else finisher.planes
        for wave in context.waves(rows, planes=planes, phase=Phase.BACKWARD, create=create, soon=soon):
            call.wave(wave)
            if finisher is not None and isinstance(wave, Wave):
                finisher.wave(wave)
        if ctx.room is not None:  # type: ignore[attr-defined]
            work.give_back(ctx.room)  # type: ignore[attr-defined]
            ctx.room = None  # type: ignore[attr-defined]
        gx, order = None, ctx.order  # type: ignore[attr-defined]
        if gx_Nh is not None:
            gx = context.sums(gx_Nh, index_N, x.shape[0]) if order is None else segment_sum(gx_Nh, order)
        anchor_gradient = gy.new_zeros(()) if needs_weights else None
        gprobs_N = None if call.gprobs_N is None else call.gprobs_N.to(probs_N.dtype)
        return gx, gprobs_N, anchor_gradient, None, None, None, None

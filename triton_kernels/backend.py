"""Waves computed by Triton kernels: one launch a product for all pages of a wave.

Which tile computes what follows from layout, routing and dtype, and sums that waves cut are carried on in the
accumulator's own fp32 (see wave.py in the kernels), so that a budget changes no bit here either. Against
``TorchBackend`` only the order inside a product differs: slices are summed in one accumulator, without rounding between
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megascale_omni.experts.rows import ComingRows, Rows
from megascale_omni.kernels.gradient_statistics import statistics_of_groups
from megascale_omni.kernels.interpreter import is_interpreted, repair
from megascale_omni.kernels.paged_activation_backward import launch_activation_backward
from megascale_omni.kernels.paged_fc1 import PageShape, launch_fc1
from megascale_omni.kernels.paged_slice_sum import Matrix, launch_slice_sum
from megascale_omni.kernels.paged_weight_gradient import launch_weight_gradient
from megascale_omni.kernels.permute_rows import sum_by_token
from megascale_omni.kernels.probs_gradient import launch_probs_gradient
from megascale_omni.kernels.segments import DTYPES
from megascale_omni.kernels.tiles import product_tiles
from megascale_omni.kernels.wave import WaveItem, WaveTables, wave_tables
from megascale_omni.kernels.wave_schedule import whole_wave_tables
from megascale_omni.paging.layout import PageLayout
from megascale_omni.paging.leases import Lease, Wave, WholeWave
from megascale_omni.paging.planes import Plane

if TYPE_CHECKING:
    from megascale_omni.experts.backends import BackwardCall
    from megascale_omni.experts.combine import Combine
    from megascale_omni.experts.function import ExpertsContext


class TritonBackend:
    """See :class:`megascale_omni.experts.backends.Backend`. ``debug`` compiles the kernels' assertions in.

    :meth:`weighting` gives a backend for one call whose probabilities scale outputs.
    """

    name = "triton"
    by_index = True

    def __init__(self, device: torch.device, *, debug: bool = False) -> None:
        self.device = device
        self.debug = debug
        if is_interpreted():
            repair()

    def schedules(self, layout: PageLayout) -> bool:
        """See the protocol; what biases need is summed by torch, expert by expert."""
        return not layout.shape.bias

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
    ) -> TritonForward:
        """See the protocol."""
        return TritonForward(Call(self, context, rows, x_Nh.dtype, index_N), x_Nh, probs_N, flat=flat, y_Nh=y_Nh)

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
    ) -> BackwardCall:
        """See the protocol."""
        return TritonBackward(Call(self, context, rows, gy_Nh.dtype, index_N), saved, gy_Nh, needs, gx_Nh=gx_Nh)

    def sum_rows(self, rows_Nh: torch.Tensor, index_N: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """See the protocol; the order of a sum does not depend on which program ran first."""
        return sum_by_token(rows_Nh, index_N, num_tokens, debug=self.debug)

    def weighting(self, combine: Combine, *, keep: bool) -> TritonBackend:
        """See :class:`megascale_omni.experts.combine.WeighsOutputs`."""
        from megascale_omni.kernels.weighted_outputs import WeightedOutputs

        return WeightedOutputs(self, combine, keep=keep)

    def measures(self, gradient: torch.Tensor) -> bool:
        """See the protocol."""
        return gradient.device.type == "cuda" or is_interpreted()

    def statistics(self, gradient: torch.Tensor) -> torch.Tensor:
        """See the protocol; one pass over the page."""
        return statistics_of_groups([[gradient]])[0]


class Call:
    """What a forward and a backward have in common: shapes, tiles, tables, sums that waves cut."""

    def __init__(
        self,
        backend: TritonBackend,
        context: ExpertsContext,
        rows: Rows | ComingRows,
        dtype: torch.dtype,
        index_N: torch.Tensor | None,
    ) -> None:
        layout = context.layout
        if dtype not in DTYPES:
            raise ValueError(f"tokens: dtype {dtype}, the kernels have {', '.join(map(str, DTYPES))}")
        weights = context.module.dtypes[Plane.WEIGHT]
        if weights is not dtype:
            raise ValueError(f"tokens: dtype {dtype}, the weights of this module have {weights}")
        self.context, self._rows, self.dtype, self.index = context, rows, dtype, index_N
        self.debug = backend.debug
        self.shape = PageShape(layout.shape.hidden, context.activation, layout.shape.bias)
        self.tiles = product_tiles(dtype, backend.device)
        self.last = layout.num_slices - 1
        self._cut = max(self.rows.counts, default=0) if self.last and not isinstance(rows, ComingRows) else 0

    @property
    def rows(self) -> Rows:
        """Where the rows of every expert are, which the host must know."""
        if isinstance(self._rows, ComingRows):
            raise RuntimeError("numbers of tokens are on their way to the host, and something asks for them")
        return self._rows

    def tables(self, wave: Wave | WholeWave, *, item_rows: int) -> WaveTables:
        """The wave as the kernels read it."""
        if isinstance(wave, Wave):
            return self._tables(wave, item_rows=item_rows)
        assert isinstance(self._rows, ComingRows)
        return whole_wave_tables(
            self._rows.coming.on_device,
            wave.weights_I,
            wave.gradients_I,
            wave.written_E,
            layout=self.context.layout,
            num_rows=self._rows.num_rows,
            item_rows=item_rows,
            chain_rows=self.tiles.slice_sum.m,
        )

    def _tables(self, wave: Wave, *, item_rows: int) -> WaveTables:
        layout, rows = self.context.layout, self.rows
        weights, gradients = wave.leases[Plane.WEIGHT], wave.leases.get(Plane.GRADIENT)
        items = []
        for expert, slice_ in wave.items:
            before = rows.starts[expert] * layout.shape.ffn + rows.counts[expert] * layout.rows * slice_
            items.append(
                WaveItem(
                    expert=expert,
                    slice=slice_,
                    first_row=rows.starts[expert],
                    rows=rows.counts[expert],
                    block=before,
                    neurons=layout.rows_of(slice_),
                    weight_address=weights.page(expert, slice_).data_ptr(),
                    gradient_address=0 if gradients is None else gradients.page(expert, slice_).data_ptr(),
                    fresh=(expert, slice_) in wave.fresh,
                )
            )
        device = self.context.workspace.device
        chain_rows = self.tiles.slice_sum.m
        return wave_tables(items, last_slice=self.last, item_rows=item_rows, chain_rows=chain_rows, device=device)

    def take(self, name: str, numel: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A flat scratch buffer."""
        return self.context.workspace.take(f"kernels.{name}", (numel,), dtype or self.dtype)

    def carried(self, name: str, number: int) -> torch.Tensor:
        """Room for the sum of one expert that a wave cuts."""
        hidden = self.shape.hidden
        return self.take(f"{name}.{number}", max(1, self._cut) * hidden, torch.float32).view(-1, hidden)


class _SliceSums:
    """Sums over slices into ``[N, h]``; two buffers for what waves cut take turns, one read and one written."""

    def __init__(self, call: Call, name: str, matrix: Matrix, out_Nh: torch.Tensor) -> None:
        self._call, self._name, self._matrix, self._out = call, name, matrix, out_Nh
        self._turn = 0

    def add(self, left: torch.Tensor, wave: WaveTables) -> None:
        """Adds the products of a wave."""
        call = self._call
        launch_slice_sum(
            left=left,
            out=self._out,
            carried_in=call.carried(self._name, self._turn),
            carried_out=call.carried(self._name, 1 - self._turn),
            wave=wave,
            shape=call.shape,
            matrix=self._matrix,
            tile=call.tiles.slice_sum,
            debug=call.debug,
        )
        self._turn = 1 - self._turn


class TritonForward:
    """See :class:`megascale_omni.experts.backends.ForwardCall`."""

    def __init__(
        self, call: Call, x_Nh: torch.Tensor, probs_N: torch.Tensor | None, *, flat: torch.Tensor, y_Nh: torch.Tensor
    ) -> None:
        self._call, self._x, self._probs, self._flat, self._y = call, x_Nh, _plain(probs_N), flat, y_Nh
        self._output = _SliceSums(call, "output", "down", y_Nh)
        self._down_biases = _DownBiases(call)

    def wave(self, wave: Wave | WholeWave) -> None:
        """See the protocol."""
        call = self._call
        tables = call.tables(wave, item_rows=call.tiles.fc1.m)
        activated = call.take("activated", tables.block)
        launch_fc1(
            x=self._x,
            probs=self._probs,
            index=call.index,
            pre=self._flat,
            activated=activated,
            wave=tables,
            shape=call.shape,
            tile=call.tiles.fc1,
            debug=call.debug,
        )
        self._output.add(activated, tables)
        for expert, bias_h in self._down_biases.whole(wave):
            rows = call.rows.of(expert)
            scaled_h = bias_h if self._probs is None else bias_h.unsqueeze(0) * self._probs[rows].unsqueeze(-1)
            self._y[rows].add_(scaled_h)  # once an expert, after the whole sum, as stock does


class TritonBackward:
    """See :class:`megascale_omni.experts.backends.BackwardCall`. ``by_row``: ``gy`` has the rows, where tokens are read
    by index all the same.
    """

    def __init__(
        self,
        call: Call,
        saved: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
        gy_Nh: torch.Tensor,
        needs: tuple[bool, bool],
        *,
        gx_Nh: torch.Tensor | None,
        by_row: bool = False,
    ) -> None:
        x_Nh, probs_N, flat = saved
        self._gy_index = None if by_row else call.index
        needs_probs, _ = needs  # whether weights need any, the waves say
        self._call, self._x, self._probs, self._flat, self._gy = call, x_Nh, _plain(probs_N), flat, gy_Nh
        self._down_biases = _DownBiases(call)
        self.gprobs_N = None
        if needs_probs and probs_N is not None:
            self.gprobs_N = torch.zeros_like(probs_N, dtype=torch.float32)
        self._inputs = None if gx_Nh is None else _SliceSums(call, "input_gradient", "fc1", gx_Nh)

    def wave(self, wave: Wave | WholeWave) -> None:
        """See the protocol."""
        call = self._call
        wanted = (wave.gradients_I if isinstance(wave, WholeWave) else wave.leases.get(Plane.GRADIENT)) is not None
        tile = call.tiles.activation_backward
        tables = call.tables(wave, item_rows=tile.m)
        grad_pre = call.take("grad_pre", call.shape.wide * tables.block)
        activated = call.take("activated", tables.block) if wanted else None
        partials = None
        if self.gprobs_N is not None:
            n_tiles = -(-tables.neurons // tile.n)
            partials = call.take("partials", n_tiles * tables.rows, torch.float32).view(n_tiles, tables.rows)
        launch_activation_backward(
            grad_y=self._gy,
            index=self._gy_index,
            probs=self._probs,
            pre=self._flat,
            activated=activated,
            grad_pre=grad_pre,
            partials=partials,
            wave=tables,
            shape=call.shape,
            tile=tile,
            debug=call.debug,
        )
        if activated is not None:
            self._weight_gradients(activated, grad_pre, tables)
            if isinstance(wave, Wave):
                gradients = wave.leases[Plane.GRADIENT]
                if call.shape.bias:
                    self._bias_gradients(wave, gradients, grad_pre)
                gradients.mark_dirty()
        if self.gprobs_N is not None and partials is not None:
            rows = call.tiles.slice_sum.m
            launch_probs_gradient(partials=partials, out=self.gprobs_N, wave=tables, rows=rows, tile=tile)
            self._down_bias_probs(wave)
        if self._inputs is not None:
            self._inputs.add(grad_pre, tables)

    def _weight_gradients(self, activated: torch.Tensor, grad_pre: torch.Tensor, tables: WaveTables) -> None:
        call = self._call
        operands: tuple[tuple[Matrix, torch.Tensor, torch.Tensor, torch.Tensor | None], ...] = (
            ("down", activated, self._gy, self._gy_index),
            ("fc1", grad_pre, self._x, call.index),
        )
        for matrix, left, right, index in operands:
            launch_weight_gradient(
                left=left,
                right=right,
                index=index,
                gradient=call.context.module.dtypes[Plane.GRADIENT],
                wave=tables,
                shape=call.shape,
                matrix=matrix,
                tile=call.tiles.weight_gradient if index is None else call.tiles.weight_gradient_by_index,
                rounded=call.context.rounds_gradients,
                debug=call.debug,
            )

    def _bias_gradients(self, wave: Wave, gradients: Lease, grad_pre: torch.Tensor) -> None:
        """Few numbers and rare: torch's own sums, page by page."""
        call, start = self._call, 0
        for expert, slice_ in wave.items:
            page, rows = gradients.views(expert, slice_), call.rows.of(expert)
            count, width = call.rows.counts[expert], call.shape.wide * call.context.layout.rows_of(slice_)
            store = (expert, slice_) in wave.fresh
            block_nR = grad_pre[start : start + count * width].view(count, width)
            start += count * width
            if page.fc1_bias_R is not None:
                _put(call.context.bias_sum(block_nR), out=page.fc1_bias_R, store=store)
            if page.down_bias_h is not None:
                gy_nh = self._gy_of(expert)
                scaled = gy_nh if self._probs is None else gy_nh * self._probs[rows].unsqueeze(-1)
                _put(call.context.bias_sum(scaled, rounded_to=call.dtype), out=page.down_bias_h, store=store)

    def _gy_of(self, expert: int) -> torch.Tensor:
        """The rows of an expert."""
        rows = self._call.rows.of(expert)
        return self._gy[rows] if self._gy_index is None else self._gy.index_select(0, self._gy_index[rows])

    def _down_bias_probs(self, wave: Wave | WholeWave) -> None:
        """What the down bias adds to the gradient of the probabilities, after the sum over all slices."""
        assert self.gprobs_N is not None
        assert self._probs is not None
        for expert, bias_h in self._down_biases.whole(wave):
            rows = self._call.rows.of(expert)
            gy_nh = self._gy_of(expert).to(torch.promote_types(self._probs.dtype, self._gy.dtype))
            self.gprobs_N[rows].add_((gy_nh * bias_h).sum(-1))


class _DownBiases:
    """Down biases of slice 0, kept until the expert's last slice is summed: their page may be gone by then."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._kept: dict[int, torch.Tensor] = {}

    def whole(self, wave: Wave | WholeWave) -> list[tuple[int, torch.Tensor]]:
        """Experts whose sum this wave ends, with their down bias."""
        if not self._call.shape.bias:
            return []
        assert isinstance(wave, Wave)
        weights, ended = wave.leases[Plane.WEIGHT], []
        for expert, slice_ in wave.items:
            bias_h = weights.views(expert, slice_).down_bias_h
            if bias_h is not None:
                self._kept[expert] = bias_h.clone()
            if slice_ == self._call.last:
                ended.append((expert, self._kept.pop(expert)))
        return ended


def _plain(probs_N: torch.Tensor | None) -> torch.Tensor | None:
    return None if probs_N is None else probs_N.contiguous()


def _put(gradient: torch.Tensor, *, out: torch.Tensor, store: bool) -> None:
    if store:
        out.copy_(gradient)
    else:
        out.add_(gradient)

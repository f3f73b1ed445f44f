"""Experts by kernels where probabilities scale outputs: weighted when a token's rows are summed, not in the products.

Products see no probabilities. The forward's rows live in scratch memory; where probabilities need a gradient, a copy of
them is kept, as autograd keeps them in a model that multiplies and adds by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megascale_omni.kernels.backend import Call, TritonBackend, TritonBackward, TritonForward
from megascale_omni.kernels.permute_rows import permute, unpermute, weight_gradient

if TYPE_CHECKING:
    from megascale_omni.experts.backends import BackwardCall
    from megascale_omni.experts.combine import Combine
    from megascale_omni.experts.function import ExpertsContext
    from megascale_omni.experts.rows import ComingRows, Rows
    from megascale_omni.paging.leases import Wave, WholeWave


class WeightedOutputs(TritonBackend):
    """A backend for one call, see :class:`megascale_omni.experts.combine.WeighsOutputs`."""

    def __init__(self, backend: TritonBackend, combine: Combine, *, keep: bool) -> None:
        super().__init__(backend.device, debug=backend.debug)
        self._combine, self._keep = combine, keep
        self._weights_N: torch.Tensor | None = None
        self._rows_Nh: torch.Tensor | None = None
        self._outputs_come = False

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
        """See the protocol; the rows are summed next."""
        self._weights_N, self._outputs_come = probs_N, True
        return super().forward(context, rows, x_Nh, None, flat=flat, y_Nh=y_Nh, index_N=index_N)

    def sum_rows(self, rows_Nh: torch.Tensor, index_N: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """See the protocol: outputs are weighted, gradients of tokens are not."""
        if not self._outputs_come:
            return super().sum_rows(rows_Nh, index_N, num_tokens)
        self._outputs_come = False
        combine, weight_Tk = self._combine, None
        if self._weights_N is not None:
            weight_Tk = self._weights_N.detach()[combine.position_Tk]
            self._rows_Nh = rows_Nh.clone() if self._keep else None
        return unpermute(rows_Nh, combine.position_Tk, weight=weight_Tk, each=combine.each, debug=self.debug)

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
        """See the protocol; ``gy`` is ``[T, h]``."""
        x_Th, probs_N, flat = saved
        assert index_N is not None
        scale_N = None if probs_N is None else probs_N.contiguous()
        gy_rows_Nh = permute(gy_Nh, index_N, scale=scale_N, debug=self.debug)
        inner = Call(self, context, rows, gy_Nh.dtype, index_N)
        call = TritonBackward(inner, (x_Th, None, flat), gy_rows_Nh, (False, needs[1]), gx_Nh=gx_Nh, by_row=True)
        return WeightedBackward(call, self._gradient_of_weights(gy_Nh) if needs[0] else None)

    def _gradient_of_weights(self, gy_Th: torch.Tensor) -> torch.Tensor:
        """``[N]``, fp32."""
        assert self._rows_Nh is not None
        position_Tk = self._combine.position_Tk
        gradient_Tk = weight_gradient(self._rows_Nh, position_Tk, gy_Th, debug=self.debug)
        return gradient_Tk.new_empty(gradient_Tk.numel()).scatter_(0, position_Tk.reshape(-1), gradient_Tk.view(-1))


class WeightedBackward:
    """See :class:`megascale_omni.experts.backends.BackwardCall`."""

    def __init__(self, inner: TritonBackward, gprobs_N: torch.Tensor | None) -> None:
        self._inner, self.gprobs_N = inner, gprobs_N

    def wave(self, wave: Wave | WholeWave) -> None:
        """See the protocol."""
        self._inner.wave(wave)

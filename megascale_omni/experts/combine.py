"""Probabilities that scale experts' outputs, as in Hugging Face's experts modules, for backends that read by index.

Megatron's experts scale activations, between the two products: mathematically the same, rounded elsewhere. Where
outputs are scaled, a token's rows are weighted when they are summed, and each row's gradient when it is read.

Shape suffixes: T tokens, k experts a token, N = T k rows sorted by expert, h hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from megascale_omni.experts.backends import Backend


@dataclass(frozen=True)
class Combine:
    """How the rows of each token become its output.

    Attributes:
        order_N: of each row its place among (token, k). position_Tk: the rows of a token, in the order in which they
            are added. each: whether every sum is rounded to the outputs' dtype; else there is one rounding.
    """

    order_N: torch.Tensor
    position_Tk: torch.Tensor
    each: bool

    @classmethod
    def of_routing(cls, index_Tk: torch.Tensor, *, each: bool) -> Combine:
        """Of the experts of each token. With ``each`` rows are added by ascending expert, else as they are listed."""
        order_N = torch.argsort(index_Tk.reshape(-1), stable=True)
        row_N = torch.empty_like(order_N)
        row_N[order_N] = torch.arange(len(order_N), device=order_N.device)
        position_Tk = row_N.view(index_Tk.shape)
        return cls(order_N, position_Tk.gather(1, index_Tk.argsort(dim=1)) if each else position_Tk, each)

    @property
    def token_N(self) -> torch.Tensor:
        """The token of each row."""
        return self.order_N // self.position_Tk.shape[1]


class WeighsOutputs(Protocol):
    """A backend that knows :class:`Combine`."""

    def weighting(self, combine: Combine, *, keep: bool) -> Backend:
        """The backend of one call whose probabilities ``[N]`` scale outputs; ``keep``: their gradient will be asked.

        Tokens ``[T, h]`` must be read by ``combine.token_N``; the result is ``[T, h]``.
        """
        ...

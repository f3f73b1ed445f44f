"""Rows and blocks: where the rows of an expert and its pre-activations lie.

[Note: wide products]
A library may have a kernel for few numbers of rows only, so that a product of ``n`` rows is computed with some more.
Experts are computed in ascending order, and what lies behind an expert's rows in a matrix are the rows of those that
come later. So a product may be *wide*: it reads rows that are there anyway and writes to rows that are written again
before they are read, and nothing is copied. Only at the end of a matrix there is no room for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from megascale_omni.paging.layout import PageLayout
from megascale_omni.paging.whole import Coming


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

    def wide(self, padded: Callable[[int], int]) -> tuple[int, ...]:
        """How many rows a product of each expert takes, where ``padded(n)`` is what it likes to take for ``n``."""
        total = sum(self.counts)
        return tuple(
            n if start + (more := padded(n)) > total else more
            for n, start in zip(self.counts, self.starts, strict=True)
        )

    def split(self, tensor: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """The rows of every expert as views; nothing for None."""
        return () if tensor is None else tensor.split(self.counts)


@dataclass(frozen=True)
class ComingRows:
    """Rows of experts whose numbers of tokens the host does not know yet: ``num_rows`` of them at most.

    They are where :class:`Rows` of these numbers would be; behind them there may be rows of nobody.
    """

    coming: Coming
    num_rows: int


class Blocks:
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

    def batch(self, items: Sequence[tuple[int, int]], *, more: int = 0) -> torch.Tensor:
        """The blocks of consecutive pages of one width as one matrix ``[B, R]``, with ``more`` rows behind them."""
        expert, slice_ = items[0]
        width = self._wide * self._layout.rows_of(slice_)
        before = self._rows.starts[expert] * self._layout.shape.ffn
        start = self._wide * (before + self._rows.counts[expert] * self._layout.rows * slice_)
        total = sum(self._rows.counts[e] for e, _ in items) + more
        return self._flat[start : start + total * width].view(total, width)

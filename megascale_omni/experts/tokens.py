"""Tokens to rows sorted by expert and back, on one rank: its own tokens, or those that came from others.

Shape suffixes: T tokens, N rows (one for each token and expert that it is routed to), h hidden size. ``index_N`` says
which token a row is of; rows are sorted by expert and, of one expert, by token. With :class:`Segments` a token's rows
are summed in the order that these give, in fp32, and rounded once; with an index alone as stock sums them.

[Note: rows are scratch]
Rows are many times as many as tokens. Kernels read tokens by index, and have no rows but those of their results. Others
are given rows: they live in the workspace, while a module is computed: autograd neither
keeps nor differentiates them, the backward gathers them again, and no memory is mapped anew for them at each call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megascale_omni.bulk import TORCH, Bulk
from megascale_omni.experts.workspace import Workspace

STATIC = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 7)
"""Whether torch finds a known number of places on an accelerator without telling the host how many there are."""


class ComingCounts:
    """Numbers of tokens on their way from an accelerator to the host, which waits for them once, or never.

    Which pages are needed, and how many rows there are, the host has to know where pages leave the device; nothing else
    of a layer makes it wait. Where all pages are there it goes on without the numbers (see [Note: counts that come
    later]); ``on_device`` int64 ``[E]`` is what kernels read.
    """

    def __init__(self, counts_E: torch.Tensor) -> None:
        self.on_device, self.caught_up_at = counts_E, -1
        self._counts_E, self._event = counts_E, None
        if counts_E.is_cuda:
            self._counts_E = torch.empty(counts_E.shape, dtype=counts_E.dtype, pin_memory=True)
            self._counts_E.copy_(counts_E, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(counts_E.device))

    @property
    def have_come(self) -> bool:
        """Whether :meth:`wait` returns at once."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> list[int]:
        """The numbers."""
        if self._event is not None:
            self._event.synchronize()
        found: list[int] = self._counts_E.tolist()
        return found


def rows_of_map(map_ET: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(expert ``[N]``, token ``[N]``) of each row of a routing map with ``num_rows`` places, ordered by both.

    Where the map has fewer places, the rows that are left over are last, and their expert and token are -1.
    """
    if map_ET.is_cuda and not STATIC:
        expert_N, token_N = map_ET.nonzero(as_tuple=True)
    else:
        expert_N, token_N = torch.nonzero_static(map_ET, size=num_rows).unbind(1)
    return expert_N, token_N.contiguous()


@dataclass(frozen=True)
class Segments:
    """Sums of rows: result ``i`` is the sum of ``values[items[starts[i]:starts[i + 1]]]``, in that order.

    ``of_item[j]`` is the result that value ``j`` goes to; the inverse direction, a gather, needs nothing else. ``bulk``
    makes both.
    """

    items: torch.Tensor
    starts: torch.Tensor
    of_item: torch.Tensor
    bulk: Bulk = TORCH

    @property
    def num_results(self) -> int:
        """How many sums."""
        return self.starts.shape[0]


Index = torch.Tensor | Segments
"""The token of each row, and perhaps the order of sums."""


def of_row(index: Index | None) -> torch.Tensor | None:
    """The token of each row."""
    return index.of_item if isinstance(index, Segments) else index


def segment_sum(values: torch.Tensor, segments: Segments) -> torch.Tensor:
    """The sums of :class:`Segments` of rows ``[R, h]``."""
    if values.shape[0] == 0 or segments.num_results == 0:
        return values.new_zeros(segments.num_results, values.shape[1])
    return segments.bulk.sum_segments(values, segments.items, segments.starts)


def gather_rows(x_Th: torch.Tensor, index_N: torch.Tensor | None, work: Workspace, name: str) -> torch.Tensor:
    """The rows ``[N, h]`` of tokens, in the workspace under ``name``; ``x`` itself where it has the rows already."""
    if index_N is None:
        return x_Th
    rows_Nh = room_for_rows(x_Th, index_N, work, name)
    torch.index_select(x_Th, 0, index_N, out=rows_Nh)
    return rows_Nh


def room_for_rows(x_Th: torch.Tensor, index_N: torch.Tensor | None, work: Workspace, name: str) -> torch.Tensor:
    """Room for the rows of tokens ``x``: in the workspace under ``name``, or new where ``x`` has the rows already."""
    if index_N is None:
        return torch.empty_like(x_Th)
    return work.take(name, (index_N.shape[0], x_Th.shape[1]), x_Th.dtype)


def sum_rows(rows_Nh: torch.Tensor, index_N: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The sum ``[T, h]`` of each token's rows, in ascending order of experts.

    The operators are those of stock's ``unpermute``, so that a sum is rounded where stock rounds it (in bf16 once), and
    has an order on an accelerator only where deterministic algorithms are asked for, as there.
    """
    sums_Th = rows_Nh.new_zeros(num_tokens, rows_Nh.shape[1])
    if torch.are_deterministic_algorithms_enabled():
        return sums_Th.index_add_(0, index_N, rows_Nh)
    return sums_Th.scatter_add_(0, index_N.unsqueeze(1).expand(-1, rows_Nh.shape[1]), rows_Nh)

"""Tokens to rows sorted by expert and back, where tokens and experts are on one rank.

Shape suffixes: T tokens, N rows (one for each token and expert that it is routed to), h hidden size. ``index_N`` says
which token a row is of; rows are sorted by expert and, of one expert, by token.

[Note: rows are scratch]
Rows are many times as many as tokens. Kernels read tokens by index, and have no rows but those of their results. Others
are given rows: they live in the workspace, while a module is computed: autograd neither
keeps nor differentiates them, the backward gathers them again, and no memory is mapped anew for them at each call.
"""

from __future__ import annotations

import torch

from megascale_omni.experts.workspace import Workspace


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

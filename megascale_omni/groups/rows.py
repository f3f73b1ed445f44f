"""Which rows travel: a token goes once to each rank that owns an expert it chose, as pure functions of the routing.

Shapes: T tokens of this rank, E experts, P ranks, L experts a rank (E = P L), R rows (token, rank), N pairs
(row, expert), B bytes of a row's expert mask.

[Note: order on the wire]
Rows lie by (destination rank, token), pairs by (row, local expert). A receiver gets rows by (source rank, token). The
row's mask says which local experts it is for, and in ascending order of experts follow their probabilities, so that
neither expert ids nor counts need to be sent beside them.

[Note: order of partial sums]
On an expert's rank the outputs of a row's experts are summed in ascending expert order; at home the rows of a token are
summed in ascending rank order. No other order occurs, whatever arrives first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megascale_omni.bulk import TORCH, Bulk
from megascale_omni.experts.tokens import Segments


@dataclass(frozen=True)
class SendRows:
    """What this rank sends.

    Attributes:
        segments: tokens as sums of rows; ``segments.of_item`` is the token of each row ``[R]``.
        pairs_N: position of each pair in ``probs.reshape(-1)``, in wire order.
        mask_RB: the local experts of each row, packed (uint8).
        rows: rows to each rank. pairs: pairs to each rank.
    """

    segments: Segments
    pairs_N: torch.Tensor
    mask_RB: torch.Tensor
    rows: tuple[int, ...]
    pairs: tuple[int, ...]

    @property
    def token_R(self) -> torch.Tensor:
        """The token of each row."""
        return self.segments.of_item


@dataclass(frozen=True)
class ReceivedRows:
    """What an expert's rank does with the rows it received.

    Attributes:
        segments: rows as sums of pairs sorted by expert; ``segments.of_item`` is the row of each sorted pair ``[N]``.
        wire_N: position on the wire of each sorted pair.
        counts: sorted pairs of each local expert.
    """

    segments: Segments
    wire_N: torch.Tensor
    counts: tuple[int, ...]

    @property
    def row_N(self) -> torch.Tensor:
        """The row of each pair, pairs sorted by (expert, row)."""
        return self.segments.of_item


def mask_bytes(local_experts: int) -> int:
    """Bytes of a row's expert mask."""
    return -(-local_experts // 8)


def send_rows(map_TE: torch.Tensor, *, ranks: int, columns: torch.Tensor | None = None, bulk: Bulk = TORCH) -> SendRows:
    """The rows of a routing map (bool; column ``p L + j`` is local expert ``j`` of rank ``p``).

    ``columns[c]``: the column of the probabilities that belongs to column ``c`` of the map; None: the same. ``bulk``
    gathers rows and sums them, here and below.
    """
    tokens, experts = map_TE.shape
    local = experts // ranks
    map_TPL = map_TE.reshape(tokens, ranks, local)
    need_PT = map_TPL.any(-1).t().contiguous()
    rank_R, token_R = need_PT.nonzero(as_tuple=True)
    map_RL = map_TPL[token_R, rank_R]
    row_N, local_N = map_RL.nonzero(as_tuple=True)
    column_N = rank_R[row_N] * local + local_N
    if columns is not None:
        column_N = columns[column_N]
    place_PT = (need_PT.view(-1).cumsum(0) - 1).view(ranks, tokens)
    counts_T = need_PT.sum(0)
    return SendRows(
        segments=Segments(place_PT.t()[need_PT.t()], counts_T.cumsum(0) - counts_T, token_R, bulk),
        pairs_N=token_R[row_N] * experts + column_N,
        mask_RB=pack(map_RL),
        rows=tuple(need_PT.sum(1).tolist()),
        pairs=tuple(map_TPL.sum((0, 2)).tolist()),
    )


def received_rows(mask_RB: torch.Tensor, *, local_experts: int, bulk: Bulk = TORCH) -> ReceivedRows:
    """How rows with these packed masks are sorted by expert, and summed again."""
    return sorted_by_expert(unpack(mask_RB, local_experts), bulk=bulk)


def sorted_by_expert(mask_RL: torch.Tensor, *, bulk: Bulk = TORCH) -> ReceivedRows:
    """The same for a mask that is not packed."""
    mask_LR = mask_RL.t()
    _, row_N = mask_LR.nonzero(as_tuple=True)
    place_RL = (mask_RL.reshape(-1).cumsum(0) - 1).view(mask_RL.shape)
    wire_N = place_RL.t()[mask_LR]
    of_wire = torch.empty_like(wire_N)
    of_wire[wire_N] = torch.arange(wire_N.shape[0], device=wire_N.device)
    counts_R = mask_RL.sum(1)
    return ReceivedRows(
        segments=Segments(of_wire, counts_R.cumsum(0) - counts_R, row_N, bulk),
        wire_N=wire_N,
        counts=tuple(mask_RL.sum(0).tolist()),
    )


def pack(mask_RL: torch.Tensor) -> torch.Tensor:
    """Eight columns of a bool matrix a byte; the first is the lowest bit."""
    rows, local = mask_RL.shape
    wide = torch.zeros(rows, mask_bytes(local) * 8, dtype=torch.uint8, device=mask_RL.device)
    wide[:, :local] = mask_RL
    bits = 2 ** torch.arange(8, dtype=torch.uint8, device=mask_RL.device)
    return (wide.view(rows, mask_bytes(local), 8) * bits).sum(-1, dtype=torch.uint8)


def unpack(mask_RB: torch.Tensor, local_experts: int) -> torch.Tensor:
    """The inverse of :func:`pack`."""
    bits = 2 ** torch.arange(8, dtype=torch.uint8, device=mask_RB.device)
    return (mask_RB.unsqueeze(-1) & bits).ne(0).flatten(1)[:, :local_experts]


def only_expert_counts(map_TE: torch.Tensor, *, ranks: int) -> torch.Tensor:
    """``[E]``: tokens for which the expert is the only one that they chose on its rank."""
    tokens, experts = map_TE.shape
    map_TPL = map_TE.reshape(tokens, ranks, experts // ranks)
    return (map_TPL & (map_TPL.sum(-1, keepdim=True) == 1)).sum(0).reshape(-1)

"""Tokens to the ranks that own their experts, and back. A failure names the ranks that are gone.

Shape suffixes: N rows sent (sorted by the expert's number in the model), M rows received, h hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from deepspeed_ext.run import Ranks


@dataclass(frozen=True)
class ExchangePlan:
    """Rows to and from each rank of the expert-parallel group, and what was received from whom.

    ``counts[source][expert]`` rows come from rank ``source`` for the local expert ``expert``, in this order.
    """

    sent: list[int]
    received: list[int]
    counts: list[list[int]]

    def by_local_expert(self, device: torch.device) -> tuple[torch.Tensor, list[int]]:
        """Indices ``[M]`` that sort received rows by expert (then source rank), and rows of each local expert."""
        experts = torch.tensor([e for row in self.counts for e in range(len(row))], device=device)
        lengths = torch.tensor([count for row in self.counts for count in row], device=device)
        expert_M = torch.repeat_interleave(experts, lengths)
        totals = [sum(column) for column in zip(*self.counts, strict=True)]
        return torch.argsort(expert_M, stable=True), totals


def exchange_counts(ranks: Ranks, counts: list[int]) -> ExchangePlan:
    """Tells every rank how many rows it gets. ``counts[e]``: rows for expert ``e`` of the model. A collective."""
    num_experts = len(counts)
    table = ranks.channel.all_gather(torch.tensor(counts, dtype=torch.int64, device=_device(ranks))).tolist()
    local = ranks.local(num_experts)
    owners = [ranks.experts_of(rank, num_experts) for rank in range(ranks.size)]
    from_each = [row[local.start : local.stop] for row in table]
    return ExchangePlan(
        sent=[sum(counts[owned.start : owned.stop]) for owned in owners],
        received=[sum(row) for row in from_each],
        counts=from_each,
    )


def _device(ranks: Ranks) -> torch.device:
    on_gpu = dist.get_backend(ranks.parallel) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def exchange_rows(rows_Nh: torch.Tensor, sent: list[int], received: list[int], ranks: Ranks) -> torch.Tensor:
    """Rows ``[M, h]`` that the other ranks send; gradients take the way back. A collective."""
    result: torch.Tensor = _ExchangeRows.apply(rows_Nh, sent, received, ranks)
    return result


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx,
        rows_Nh: torch.Tensor,
        sent: list[int],
        received: list[int],
        ranks: Ranks,
    ) -> torch.Tensor:
        ctx.way_back = (received, sent, ranks)  # type: ignore[attr-defined]
        return ranks.channel.exchange(rows_Nh, sent, received)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, gradient_Mh: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        sent, received, ranks = ctx.way_back  # type: ignore[attr-defined]
        return ranks.channel.exchange(gradient_Mh, sent, received), None, None, None

"""Experts whose pages are spread over ranks: rows are gathered by these ranks, and partial outputs reduce-scattered.

[Note: spread experts]
Each rank of such a group holds consecutive neurons of every one of its experts, and ranks ascend as neurons do. A row
that arrives at one of them is given to all; each computes what its own pages make of it. The parts go back to the rank
at which the row arrived, which adds them up by ascending rank, and so by ascending slice, in fp32, and rounds once. The
backward is the same with the two exchanged. Ranks hold equally many neurons of all experts, so that all of a group's
members, and nobody else, take part.
"""

from __future__ import annotations

import torch

from megascale_omni.groups.channel import Channel, Transfer

Context = torch.autograd.function.FunctionCtx


def gather_counts(counts: tuple[int, ...], channel: Channel, *, device: torch.device) -> list[tuple[int, ...]]:
    """``counts`` of every rank of the group; of each count, those of all ranks."""
    told = channel.all_gather(torch.tensor(counts, dtype=torch.int64, device=device))
    return [tuple(column) for column in told.t().tolist()]


def gather_rows(values: torch.Tensor, channel: Channel, counts: tuple[int, ...]) -> torch.Tensor:
    """The rows of all ranks, by ascending rank; ``counts[p]`` are rank ``p``'s. Gradients are reduce-scattered."""
    result: torch.Tensor = _GatherRows.apply(values, channel, counts)
    return result


def scatter_sums(values: torch.Tensor, channel: Channel, counts: tuple[int, ...]) -> torch.Tensor:
    """This rank's rows of the sums over ranks of ``values``, which has the rows of all. Gradients are gathered."""
    result: torch.Tensor = _ScatterSums.apply(values, channel, counts)
    return result


def all_gather_rows(values: torch.Tensor, channel: Channel, counts: tuple[int, ...]) -> torch.Tensor:
    """As :func:`gather_rows`, of anything that takes no gradients."""
    own = values.contiguous()
    result = own.new_empty(sum(counts), *own.shape[1:])
    parts = result.split(counts)
    transfers = []
    for peer in _others(channel):
        transfers += [Transfer(peer, own, True), Transfer(peer, parts[peer], False)]
    under_way = channel.transfer(transfers)
    parts[channel.rank].copy_(own)
    under_way.wait()
    return result


def reduce_scatter_rows(values: torch.Tensor, channel: Channel, counts: tuple[int, ...]) -> torch.Tensor:
    """As :func:`scatter_sums`, without gradients: parts are added by ascending rank in fp32 and rounded once."""
    given = values.contiguous().split(counts)
    own = given[channel.rank]
    came = {peer: torch.empty_like(own) for peer in _others(channel)}
    transfers = []
    for peer, part in came.items():
        transfers += [Transfer(peer, given[peer], True), Transfer(peer, part, False)]
    channel.transfer(transfers).wait()
    came[channel.rank] = own
    total = torch.zeros_like(own, dtype=torch.float32)
    for rank in range(channel.size):
        total += came[rank]
    return total.to(values.dtype)


def _others(channel: Channel) -> list[int]:
    return [peer for peer in range(channel.size) if peer != channel.rank]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Context, values: torch.Tensor, channel: Channel, counts: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.way = (channel, counts)  # type: ignore[attr-defined]
        return all_gather_rows(values, channel, counts)

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return reduce_scatter_rows(gradient, *ctx.way), None, None  # type: ignore[attr-defined]


class _ScatterSums(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Context, values: torch.Tensor, channel: Channel, counts: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.way = (channel, counts)  # type: ignore[attr-defined]
        return reduce_scatter_rows(values, channel, counts)

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return all_gather_rows(gradient, *ctx.way), None, None  # type: ignore[attr-defined]

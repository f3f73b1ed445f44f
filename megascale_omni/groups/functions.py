"""Gather and sum of rows, and their exchange between ranks, as autograd nodes; each one's gradient is the other."""

from __future__ import annotations

import torch

from megascale_omni.experts.tokens import Segments, segment_sum
from megascale_omni.groups.channel import Channel

Context = torch.autograd.function.FunctionCtx


def gather(values: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Row ``j`` of the result is ``values[segments.of_item[j]]``; gradients are summed in the segments' order."""
    result: torch.Tensor = _Gather.apply(values, segments)
    return result


def sum_rows(values: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Row ``i`` of the result is the sum of its segment, in fp32 and rounded once; zeros where there is none."""
    result: torch.Tensor = _Sum.apply(values, segments)
    return result


def exchange(values: torch.Tensor, channel: Channel, send: tuple[int, ...], receive: tuple[int, ...]) -> torch.Tensor:
    """Rows ``values`` (``send[p]`` to each rank in turn) for ``receive[p]`` rows from each; gradients go back."""
    result: torch.Tensor = _Exchange.apply(values, channel, send, receive)
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, values: torch.Tensor, segments: Segments) -> torch.Tensor:  # type: ignore[override]
        ctx.segments = segments  # type: ignore[attr-defined]
        return segments.bulk.take_rows(values, segments.of_item)

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return segment_sum(gradient.contiguous(), ctx.segments), None  # type: ignore[attr-defined]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, values: torch.Tensor, segments: Segments) -> torch.Tensor:  # type: ignore[override]
        ctx.segments = segments  # type: ignore[attr-defined]
        return segment_sum(values.contiguous(), segments)

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        segments: Segments = ctx.segments  # type: ignore[attr-defined]
        return segments.bulk.take_rows(gradient, segments.of_item), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Context, values: torch.Tensor, channel: Channel, send: tuple[int, ...], receive: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.way = (channel, send, receive)  # type: ignore[attr-defined]
        return channel.exchange(values, send, receive)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Context, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        channel, send, receive = ctx.way  # type: ignore[attr-defined]
        return channel.exchange(gradient, receive, send), None, None, None

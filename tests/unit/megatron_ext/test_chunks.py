"""Tokens that are sorted already: the same values as stock's sort, and no copy."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs

from megatron_ext.chunks import sort_chunks

SIZES = torch.tensor([3, 0, 2, 4])


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(9, 5, requires_grad=True), torch.rand(9, requires_grad=True)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("with_probs", [True, False])
def test_values_and_gradients_are_stocks(order: list[int], with_probs: bool) -> None:
    hidden, probs = tokens()
    index = torch.tensor(order)
    results = []
    for sort in (sort_chunks_by_idxs, lambda *a, **k: sort_chunks(sort_chunks_by_idxs, *a, **k)):
        out, out_probs = sort(hidden, SIZES, index, probs=probs if with_probs else None)
        assert (out_probs is None) is not with_probs
        weight = torch.arange(out.numel(), dtype=out.dtype).view_as(out)
        loss = (out * weight).sum() + (0 if out_probs is None else (out_probs * weight[:, 0]).sum())
        gradients = torch.autograd.grad(loss, (hidden, probs), allow_unused=True)
        results.append((out, out_probs, *gradients))
    for stock, ours in zip(*results, strict=True):
        assert ours is None if stock is None else ours.equal(stock)


def test_sorted_tokens_are_not_copied_and_the_order_is_read_once() -> None:
    hidden, probs = tokens()
    index = torch.tensor([0, 1, 2, 3])
    for _ in range(2):
        out, out_probs = sort_chunks(sort_chunks_by_idxs, hidden, SIZES, index, probs=probs)
        assert out is hidden
        assert out_probs is probs
        index.tolist = lambda: pytest.fail("read again")  # type: ignore[method-assign]


def test_a_fused_sort_stays_stocks() -> None:
    called = []

    def stock(*args: object, **kwargs: object) -> tuple[torch.Tensor, None]:
        called.append(kwargs)
        return torch.zeros(1), None

    sort_chunks(stock, torch.ones(9, 2), SIZES, torch.tensor([1, 0, 2, 3]), fused=True)
    assert called == [{"probs": None, "fused": True}]

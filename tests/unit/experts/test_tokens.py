"""Experts that are given tokens and the index of their rows compute, bit for bit, what they compute of sorted rows."""

from collections.abc import Sequence

import pytest
import torch

from megascale_omni.experts.tokens import sum_rows
from tests.unit.experts.paged import FFN, PRODUCTS, SWIGLU, drop_gradients, grad_of, gradients, leaf, small_experts

HIDDEN = 24
ROUTES: dict[str, Sequence[Sequence[int]]] = {
    "two each": [[0, 1], [1, 3], [0, 3], [0, 1], [3, 1]] * 9,
    "some dropped": [[0], [], [0, 1, 2, 3], [2]],
    "none": [[], [], []],
    "no tokens": [],
}


def index_of(routes: Sequence[Sequence[int]]) -> tuple[torch.Tensor, list[int]]:
    """The token of each row, rows sorted by expert, and the rows of each expert."""
    rows = [[token for token, experts in enumerate(routes) if expert in experts] for expert in range(4)]
    return torch.tensor([token for row in rows for token in row], dtype=torch.int64), [len(row) for row in rows]


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [16, FFN], ids=["several pages", "one page"])
@pytest.mark.parametrize("routes", ROUTES.values(), ids=ROUTES.keys())
def test_rows_by_index_give_the_bits_of_rows_that_autograd_gathers_and_sums(routes, rows, dtype, products):
    experts = small_experts(SWIGLU, rows=rows, bias=True, dtype=dtype, products=products)
    index, counts = index_of(routes)
    tokens, probs = torch.randn(len(routes), HIDDEN).to(dtype), torch.rand(len(index)).to(dtype)
    grad = torch.randn(len(routes), HIDDEN).to(dtype)
    found = []
    for by_index in (False, True):
        x, p = leaf(tokens), leaf(probs)
        if by_index:
            y = experts(x, counts, p, index)
        else:
            y = sum_rows(experts(x.index_select(0, index), counts, p), index, len(routes))
        y.backward(grad)
        found.append({"y": y.detach(), "x": grad_of(x), "probs": grad_of(p), **gradients(experts)})
        drop_gradients(experts)
    assert [name for name, tensor in found[0].items() if not tensor.equal(found[1][name])] == []


def test_no_rows_are_kept_for_the_backward():
    index, counts = index_of(ROUTES["two each"])
    kept = []

    def keep(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        small_experts()(leaf(torch.randn(45, HIDDEN)), counts, leaf(torch.rand(90)), index)
    pre_activations = 90 * 2 * FFN
    assert sorted(kept) == [(45, HIDDEN), (90,), (90,), (pre_activations,)]


def test_sums_are_the_same_where_algorithms_must_be_deterministic():
    index, _ = index_of(ROUTES["two each"])
    rows = torch.randn(len(index), HIDDEN, dtype=torch.bfloat16)
    expected = sum_rows(rows, index, 45)
    torch.use_deterministic_algorithms(True)
    try:
        assert sum_rows(rows, index, 45).equal(expected)
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_index_of_another_length_is_refused():
    with pytest.raises(RuntimeError, match="with 5 tokens were announced, 4 experts with 4 tokens are here"):
        small_experts()(torch.randn(9, HIDDEN), [5, 0, 0, 0], None, torch.arange(4))

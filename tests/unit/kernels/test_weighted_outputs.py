"""Outputs weighted when a token's rows are summed: what a model that multiplies and adds by itself computes."""

from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch

from megascale_omni.experts.combine import Combine
from megascale_omni.experts.module import PagedExperts
from megascale_omni.kernels.backend import TritonBackend
from megascale_omni.kernels.permute_rows import unpermute
from megascale_omni.kernels.weighted_outputs import WeightedOutputs
from tests.unit.experts.paged import GELU, HIDDEN, SWIGLU, gradients, leaf, small_experts
from tests.unit.experts.reference import relative_error
from tests.unit.kernels.checker import checked
from tests.unit.kernels.test_backend import pages_of

CPU = torch.device("cpu")
EXPERTS, TOKENS, TOP_K = 4, 9, 2


def stock_sum(y_Nh: torch.Tensor, weights_Tk: torch.Tensor, index_Tk: torch.Tensor, *, each: bool) -> torch.Tensor:
    """As Hugging Face's two implementations weight and add, operator by operator."""
    order = torch.argsort(index_Tk.reshape(-1), stable=True)
    weighted = y_Nh * weights_Tk.reshape(-1)[order].unsqueeze(-1)
    if not each:
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        return weighted[inverse].view(*index_Tk.shape, -1).sum(dim=1).to(y_Nh.dtype)
    total = torch.zeros(len(index_Tk), y_Nh.shape[1], dtype=y_Nh.dtype)
    for row, place in enumerate(order.tolist()):  # by ascending expert
        token = place // index_Tk.shape[1]
        total = total.index_add(0, torch.tensor([token]), weighted[row : row + 1].to(y_Nh.dtype))
    return total


def routing(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    scores[:, 3] = 0.0  # an expert without tokens
    weights, index = scores.topk(TOP_K)
    return weights, index


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_has_the_bits_of_the_operators(dtype, weight_dtype, each):
    torch.manual_seed(1)
    weights, index = routing()
    y, weights = torch.randn(TOKENS * TOP_K, 40).to(dtype), weights.to(weight_dtype)
    combine = Combine.of_routing(index, each=each)
    weight_N = weights.reshape(-1)[combine.order_N]
    with checked(order=5):
        found = unpermute(y, combine.position_Tk, weight=weight_N[combine.position_Tk], each=each)
    assert torch.equal(found, stock_sum(y, weights, index, each=each))


def experts_of(backend: TritonBackend | None, **options) -> PagedExperts:
    torch.manual_seed(3)
    return small_experts(backend=backend, **options)


@pytest.mark.parametrize(
    ("activation", "dtype", "each", "bias"),
    [(SWIGLU, torch.float32, False, True), (GELU, torch.float32, True, False), (SWIGLU, torch.bfloat16, True, False)],
)
def test_experts_are_those_that_get_rows_and_give_rows(activation, dtype, each, bias):
    weights, index = routing()
    counts = torch.bincount(index.reshape(-1), minlength=EXPERTS).tolist()
    torch.manual_seed(2)
    tokens, grad = torch.randn(TOKENS, HIDDEN).to(dtype), torch.randn(TOKENS, HIDDEN).to(dtype)
    found = []
    for backend in (None, TritonBackend(CPU, debug=True)):
        experts = experts_of(backend, activation=activation, dtype=dtype, gradient_dtype=torch.float32, bias=bias)
        x, given = leaf(tokens), leaf(weights.to(dtype))
        combine = Combine.of_routing(index, each=each)
        with checked(reachable=partial(pages_of, experts), order=7) if backend and bias else nullcontext():
            if backend is None:
                y = stock_sum(experts(x[combine.token_N], counts), given, index, each=each)
            else:
                y = experts(x, counts, given.reshape(-1)[combine.order_N], combine.token_N, combine)
            y.backward(grad)
        assert x.grad is not None
        assert given.grad is not None
        found.append({"y": y.detach(), "x": x.grad, "weights": given.grad, **gradients(experts)})
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    for name, expected in found[0].items():
        assert relative_error(found[1][name], expected) <= bound, name


def test_an_evaluation_keeps_no_rows():
    weights, index = routing()
    counts = torch.bincount(index.reshape(-1), minlength=EXPERTS).tolist()
    combine, experts = Combine.of_routing(index, each=False), experts_of(TritonBackend(CPU))
    made = patch.object(WeightedOutputs, "__init__", autospec=True, side_effect=WeightedOutputs.__init__)
    with torch.no_grad(), made as init:
        experts(torch.randn(TOKENS, HIDDEN), counts, weights.reshape(-1)[combine.order_N], combine.token_N, combine)
    (call,) = init.call_args_list
    assert call.args[0]._rows_Nh is None

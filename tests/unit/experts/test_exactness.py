"""Paged experts compute what plain autograd computes: output, gradients of tokens, probabilities and weights."""

import itertools
from typing import get_args

import pytest
import torch

from megascale_omni.experts import torch_backend
from megascale_omni.experts.activation import Activation, Kind
from tests.unit.experts.paged import (
    FFN,
    GELU,
    HIDDEN,
    PRODUCTS,
    SWIGLU,
    Batch,
    active_experts,
    paged,
    random_batch,
    small_experts,
)
from tests.unit.experts.reference import Tensors, reference, relative_error

ACTIVATIONS = [Activation(kind, gated=gated) for kind in get_args(Kind) for gated in (True, False)]
ACTIVATIONS.append(Activation("quick_gelu", gated=True, clamp=0.5, offset=1.0))

ROUTINGS = {
    "uneven": (5, 0, 17, 3),
    "one token": (0, 1, 0, 0),
    "all to the last expert": (0, 0, 0, 9),
    "all to the first expert": (33, 0, 0, 0),
    "one each": (1, 1, 1, 1),
    "multiples of a tile": (16, 32, 16, 48),
    "none": (0, 0, 0, 0),
}
ROWS = {"whole expert": FFN, "short last page": 16, "equal pages": 20, "one neuron a page": 1}

FP32_BOUND = 1e-5


def name_of(activation: Activation) -> str:
    return f"{activation.kind}-{'gated' if activation.gated else 'ungated'}{'-clamp' if activation.clamp else ''}"


def errors(actual: Tensors, expected: Tensors) -> dict[str, float]:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert tensor.shape == expected[name].shape, name
    return {name: relative_error(actual[name], expected[name]) for name in expected}


def assert_exact(activation: Activation, batch: Batch, **options) -> None:
    experts = small_experts(activation, **options)
    expected = reference(experts.dense(), batch.x, batch.counts, batch.probs, batch.grad_y, activation)
    found = errors(paged(experts, batch), expected)
    assert {name: error for name, error in found.items() if not error <= FP32_BOUND} == {}
    assert active_experts(experts) == [e for e, n in enumerate(batch.counts) if n]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("probs", [True, False], ids=["probs", "unscaled"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=name_of)
def test_fp32_every_kind_of_expert(activation, probs, bias):
    assert_exact(activation, random_batch(ROUTINGS["uneven"], probs=probs), bias=bias)


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("counts", ROUTINGS.values(), ids=ROUTINGS.keys())
def test_fp32_every_routing_and_cut(counts, rows, products):
    assert_exact(SWIGLU, random_batch(counts), rows=rows, products=products, bias=True)
    assert_exact(GELU, random_batch(counts), rows=rows, products=products)


def test_fp32_with_one_expert():
    assert_exact(SWIGLU, random_batch((7,)), num_experts=1, bias=True)


def test_the_comparison_sees_one_gradient_off_by_a_thousandth():
    batch = random_batch(ROUTINGS["uneven"])
    experts = small_experts()
    expected = reference(experts.dense(), batch.x, batch.counts, batch.probs, batch.grad_y, SWIGLU)
    actual = paged(experts, batch)
    mutant = "local_experts.2.linear_fc2.weight"
    actual[mutant] = actual[mutant] * 1.001
    assert [name for name, error in errors(actual, expected).items() if error > FP32_BOUND] == [mutant]


# -- bf16: errors against fp32 products of the same bf16 numbers, in units of what stock's own operators lose ----------

BF16_BOUND = 1.5  # times the control: each expert computed in two halves (found: at most 1.11 over five seeds)
BF16_CASES = list(
    itertools.product(
        [SWIGLU, GELU, Activation("quick_gelu", gated=True, clamp=0.5, offset=1.0)],
        [torch.float32, torch.bfloat16, False],
        [16, FFN, 1],
    )
)


@pytest.mark.parametrize(
    ("activation", "probs", "rows"),
    BF16_CASES,
    ids=[f"{name_of(a)}-probs {str(p).removeprefix('torch.')}-rows {r}" for a, p, r in BF16_CASES],
)
def test_bf16_loses_no_more_than_stock_in_two_halves(activation, probs, rows):
    counts = (40, 0, 130, 3)
    batch = random_batch(counts, probs=probs, dtype=torch.bfloat16)
    experts = small_experts(activation, rows=rows, bias=True, dtype=torch.bfloat16)
    args = (experts.dense(), batch.x, counts, batch.probs, batch.grad_y, activation)
    truth = reference(*args, dtype=torch.float32)
    control = errors(reference(*args, parts=2), truth)
    found = errors(paged(experts, batch), truth)
    assert {name: (found[name], control[name]) for name in found if not found[name] <= BF16_BOUND * control[name]} == {}


@pytest.mark.parametrize("rows", [16, 8, 1])
def test_bf16_pages_have_the_bits_of_a_whole_expert(rows):
    batch = random_batch((40, 0, 130, 3), probs=torch.bfloat16, dtype=torch.bfloat16)
    whole = small_experts(GELU, rows=FFN, dtype=torch.bfloat16)
    cut = small_experts(GELU, rows=rows, dtype=torch.bfloat16)
    cut.load_dense(whole.dense())
    found, expected = paged(cut, batch), paged(whole, batch)
    assert [name for name, tensor in found.items() if name != "probs" and not tensor.equal(expected[name])] == []


@pytest.mark.parametrize("activation", [SWIGLU, GELU], ids=name_of)
def test_bf16_pages_of_weights_too_large_to_be_one_product(activation, monkeypatch):
    monkeypatch.setattr(torch_backend, "_JOINED_BYTES", HIDDEN * FFN * 2 - 1)
    batch = random_batch((40, 0, 130, 3), probs=torch.bfloat16, dtype=torch.bfloat16)
    experts = small_experts(activation, bias=True, dtype=torch.bfloat16)
    args = (experts.dense(), batch.x, batch.counts, batch.probs, batch.grad_y, activation)
    truth = reference(*args, dtype=torch.float32)
    control = errors(reference(*args, parts=2), truth)
    found = errors(paged(experts, batch), truth)
    assert {name: (found[name], control[name]) for name in found if not found[name] <= BF16_BOUND * control[name]} == {}
    assert not any("right" in name and "wide" not in name for name, _ in experts.context.workspace._buffers)


def test_bf16_fp32_probabilities_meet_the_down_bias_in_fp32():
    batch = random_batch((5, 0, 3, 2), probs=torch.float32, dtype=torch.bfloat16)
    experts = small_experts(bias=True, dtype=torch.bfloat16)
    weights = {name: torch.zeros_like(tensor) for name, tensor in experts.dense().items()}
    biases = {name: torch.randn(tensor.shape).bfloat16() for name, tensor in weights.items() if "fc2.bias" in name}
    experts.load_dense(weights | biases)  # outputs are bias * p alone
    bias_of_token = torch.stack([*biases.values()]).repeat_interleave(torch.tensor(batch.counts), dim=0)
    expected = (batch.grad_y.float() * bias_of_token.float()).sum(-1)
    assert relative_error(paged(experts, batch)["probs"], expected) < 1e-6


def test_bf16_gradients_and_outputs_have_the_dtypes_of_their_tensors():
    batch = random_batch((3, 0, 2, 1), probs=torch.float32, dtype=torch.bfloat16)
    experts = small_experts(bias=True, dtype=torch.bfloat16, gradient_dtype=torch.float32)
    result = paged(experts, batch)
    assert {name: result.pop(name).dtype for name in ("y", "x", "probs")} == {
        "y": torch.bfloat16,
        "x": torch.bfloat16,
        "probs": torch.float32,
    }
    assert {tensor.dtype for tensor in result.values()} == {torch.float32}

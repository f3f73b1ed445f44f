"""Paged experts in a graph: what is frozen gets nothing, what is alive stays connected, recompute changes no bit."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megascale_omni.paging.planes import Plane
from tests.unit.experts.paged import (
    HIDDEN,
    PRODUCTS,
    active_experts,
    drop_gradients,
    forward_backward,
    grad_of,
    gradients,
    leaf,
    random_batch,
    small_experts,
)
from tests.unit.experts.reference import Tensors

COUNTS = (5, 0, 9, 2)


def assert_same_bits(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not actual[name].equal(expected[name])] == []


def test_frozen_inputs_still_give_weight_gradients():
    experts, batch = small_experts(bias=True), random_batch(COUNTS)
    forward_backward(experts, batch)
    expected = gradients(experts)
    drop_gradients(experts)
    y = experts(batch.x, batch.counts, batch.probs)  # neither tokens nor probabilities require gradients
    assert y.requires_grad
    y.backward(batch.grad_y)
    assert_same_bits(gradients(experts), expected)


def test_frozen_experts_get_no_gradient_page_and_pass_gradients_on():
    experts, batch = small_experts(bias=True), random_batch(COUNTS)
    expected = forward_backward(experts, batch)
    drop_gradients(experts)
    assert experts.requires_grad_(False) is experts
    assert_same_bits(forward_backward(experts, batch), expected)
    assert active_experts(experts) == []
    experts.requires_grad_(True)
    forward_backward(experts, batch)
    assert active_experts(experts) == [0, 2, 3]


def test_frozen_experts_under_frozen_inputs_make_no_graph():
    experts, batch = small_experts(), random_batch(COUNTS)
    experts.requires_grad_(False)
    assert not experts(batch.x, batch.counts, batch.probs).requires_grad
    assert ("pre_activations", torch.float32) in experts.context.workspace._buffers  # none were kept for a backward


@pytest.mark.parametrize("wants", ["x", "probs"])
def test_only_the_input_that_requires_a_gradient_gets_one(wants):
    experts, batch = small_experts(bias=True), random_batch(COUNTS)
    expected = forward_backward(experts, batch)[wants]
    inputs = {"x": leaf(batch.x), "probs": leaf(batch.probs)}
    for name, tensor in inputs.items():
        tensor.requires_grad_(name == wants)
    experts(inputs["x"], batch.counts, inputs["probs"]).backward(batch.grad_y)
    assert grad_of(inputs.pop(wants)).equal(expected)
    assert [tensor.grad for tensor in inputs.values()] == [None]


@pytest.mark.parametrize("probs", [True, False], ids=["probs", "unscaled"])
def test_no_tokens_at_all_keep_the_graph_connected(probs):
    experts = small_experts(bias=True)
    batch = random_batch((0, 0, 0, 0), probs=probs)
    before = torch.randn(0, HIDDEN, requires_grad=True)
    p = leaf(batch.probs) if probs else None
    y = experts(before * 2, batch.counts, p)
    assert y.shape == (0, HIDDEN)
    assert y.requires_grad
    y.sum().backward()
    assert grad_of(before).shape == (0, HIDDEN)
    assert p is None or grad_of(p).shape == (0,)
    assert active_experts(experts) == []
    experts.manager.check_integrity()


def test_no_tokens_and_frozen_inputs_still_reach_backward():
    """A rank without tokens takes part in everything that hangs on its backward, e.g. hooks that start collectives."""
    experts = small_experts()
    y = experts(torch.empty(0, HIDDEN), [0, 0, 0, 0])
    assert y.requires_grad
    y.sum().backward()


def test_without_a_graph_pre_activations_live_in_reused_memory():
    experts, batch = small_experts(bias=True), random_batch(COUNTS)
    expected = forward_backward(experts, batch)["y"]
    with torch.no_grad():
        for _ in range(2):
            y = experts(leaf(batch.x), batch.counts, batch.probs)
            assert y.equal(expected)
            assert not y.requires_grad
    assert ("pre_activations", torch.float32) in experts.context.workspace._buffers


def test_a_graph_keeps_its_own_pre_activations():
    experts, batch = small_experts(), random_batch(COUNTS)
    expected = forward_backward(experts, batch)
    drop_gradients(experts)
    x = leaf(batch.x)
    y = experts(x, batch.counts, batch.probs)
    with torch.no_grad():  # evaluation between a forward and its backward
        experts(torch.randn(50, HIDDEN), [50, 0, 0, 0])
    experts(torch.randn(50, HIDDEN), [0, 0, 50, 0])  # and another micro-batch
    y.backward(batch.grad_y)
    assert grad_of(x).equal(expected["x"])


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
def test_recompute_changes_no_bit(reentrant, dtype, products):
    experts = small_experts(bias=True, dtype=dtype, products=products)
    batch = random_batch(COUNTS, dtype=dtype)
    expected = forward_backward(experts, batch) | gradients(experts)
    drop_gradients(experts)
    x, probs = leaf(batch.x), leaf(batch.probs)
    y = checkpoint(experts, x, batch.counts, probs, use_reentrant=reentrant)
    y.backward(batch.grad_y)
    assert_same_bits({"y": y.detach(), "x": grad_of(x), "probs": grad_of(probs)} | gradients(experts), expected)
    experts.manager.check_integrity()


def test_the_same_step_twice_gives_the_same_bits():
    experts, batch = small_experts(bias=True), random_batch(COUNTS)
    runs = []
    for _ in range(2):
        runs.append(forward_backward(experts, batch) | gradients(experts))
        drop_gradients(experts)
    assert_same_bits(*runs)


def test_tokens_and_gradients_that_are_not_contiguous_are_taken_as_they_are():
    experts, batch = small_experts(bias=True), random_batch(COUNTS)
    expected = forward_backward(experts, batch) | gradients(experts)
    drop_gradients(experts)
    x = batch.x.t().contiguous().t().requires_grad_()
    probs = leaf(batch.probs).detach().repeat_interleave(2)[::2].requires_grad_()
    assert not x.is_contiguous()
    assert not probs.is_contiguous()
    y = experts(x, batch.counts, probs)
    y.backward(batch.grad_y.t().contiguous().t())
    assert_same_bits({"y": y.detach(), "x": grad_of(x), "probs": grad_of(probs)} | gradients(experts), expected)


@pytest.mark.parametrize(
    "counts", [(5, 0, 9, 3), (5, 0, 9), (5, 0, 9, 1, 1)], ids=["too many", "too few experts", "too many experts"]
)
def test_counts_that_do_not_fit_are_refused_before_anything_is_computed(counts):
    experts, batch = small_experts(), random_batch(COUNTS)
    with pytest.raises(RuntimeError, match=rf"module0\.experts: {len(counts)} experts with {sum(counts)} tokens"):
        experts(batch.x, counts, batch.probs)
    assert not experts.manager.table.pins.any()


def test_an_error_in_the_middle_of_a_wave_leaves_no_page_pinned():
    experts, batch = small_experts(), random_batch(COUNTS)
    with pytest.raises(RuntimeError):
        experts(batch.x.to(torch.float64), batch.counts, batch.probs)
    assert not experts.manager.table.pins.any()
    assert not experts.manager.present(experts.pages, Plane.GRADIENT).any()
    forward_backward(experts, batch)


def test_a_kept_graph_may_be_walked_again_until_its_pre_activations_are_overwritten():
    experts, batch = small_experts(bias=True), random_batch(COUNTS)
    x, other = leaf(batch.x), leaf(batch.x * 2)
    y = experts(x, batch.counts, batch.probs)
    (once,) = torch.autograd.grad(y, x, batch.grad_y, retain_graph=True)
    (again,) = torch.autograd.grad(y, x, batch.grad_y, retain_graph=True)
    assert again.equal(once)
    experts(other, batch.counts, batch.probs)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x, batch.grad_y)


def test_forwards_that_are_alive_at_once_do_not_share_what_they_keep():
    experts, batches = small_experts(bias=True), [random_batch(COUNTS) for _ in range(3)]
    expected = [forward_backward(experts, batch) for batch in batches]
    inputs = [leaf(batch.x) for batch in batches]
    outputs = [experts(x, batch.counts, batch.probs) for x, batch in zip(inputs, batches, strict=True)]
    for y, batch in reversed(list(zip(outputs, batches, strict=True))):
        y.backward(batch.grad_y)
    assert [grad_of(x).equal(e["x"]) for x, e in zip(inputs, expected, strict=True)] == [True] * 3
    assert len(experts.context.workspace._given_back) == 3

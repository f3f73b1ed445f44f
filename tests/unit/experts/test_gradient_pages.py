"""Gradient pages: made by an expert's first token, added to until the step, forgotten after it; else absent."""

import pytest
import torch

from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.experts.shards import PageShards
from megascale_omni.paging.planes import Plane
from tests.unit.experts.paged import (
    FFN,
    GELU,
    SWIGLU,
    active_experts,
    drop_gradients,
    forward_backward,
    gradients,
    random_batch,
    small_experts,
)
from tests.unit.experts.reference import Tensors, reference, relative_error


def expected_gradients(experts, *batches) -> Tensors:
    """The sum over micro-batches of what autograd gives."""
    total: Tensors = {}
    for batch in batches:
        args = (experts.dense(), batch.x, batch.counts, batch.probs, batch.grad_y, experts.context.activation)
        for name, gradient in reference(*args).items():
            if name in experts.dense():
                total[name] = total[name] + gradient if name in total else gradient
    return total


def assert_gradients(experts, *batches) -> None:
    found = gradients(experts)
    for name, expected in expected_gradients(experts, *batches).items():
        assert relative_error(found[name], expected) <= 1e-5, name


def test_no_page_exists_before_the_first_token():
    experts = small_experts()
    with torch.no_grad():
        experts(torch.randn(4, experts.shape.hidden), [4, 0, 0, 0])
    assert active_experts(experts) == []


def test_only_experts_with_tokens_have_pages_whatever_memory_held_before():
    experts = small_experts(bias=True)  # the arena is poisoned with NaN: a page read before it is written shows
    batch = random_batch((0, 3, 0, 2))
    forward_backward(experts, batch)
    assert active_experts(experts) == [1, 3]
    with pytest.raises(
        RuntimeError, match=r"gradient page of module0\.experts, expert 0, slice 0 is leased but absent"
    ):
        experts.lease(Plane.GRADIENT, [(0, 0)])
    assert {item.expert for item, _ in experts.named_slices(Plane.GRADIENT)} == {1, 3}
    assert not any(gradient.isnan().any() for gradient in gradients(experts).values())
    assert_gradients(experts, batch)


@pytest.mark.parametrize("activation", [SWIGLU, GELU], ids=["gated", "ungated"])
def test_a_second_micro_batch_adds_to_the_first(activation):
    experts = small_experts(activation, bias=True)
    first, second = random_batch((3, 0, 5, 0)), random_batch((4, 2, 0, 0))
    forward_backward(experts, first)
    forward_backward(experts, second)
    assert active_experts(experts) == [0, 1, 2]
    assert_gradients(experts, first, second)


def test_backwards_in_another_order_than_forwards_add_up_too():
    experts = small_experts()
    batches = [random_batch((3, 0, 5, 0)), random_batch((1, 1, 1, 1)), random_batch((0, 7, 0, 2))]
    outputs = [experts(batch.x, batch.counts, batch.probs) for batch in batches]
    for batch, y in reversed(list(zip(batches, outputs, strict=True))):
        y.backward(batch.grad_y)
    assert_gradients(experts, *batches)


def test_bf16_products_add_up_in_an_fp32_plane():
    experts = small_experts(dtype=torch.bfloat16, gradient_dtype=torch.float32)
    batch = random_batch((3, 0, 5, 2), dtype=torch.bfloat16)
    forward_backward(experts, batch)
    once = gradients(experts)
    for _ in range(2):
        forward_backward(experts, batch)
    for name, gradient in gradients(experts).items():
        assert gradient.equal(once[name] + once[name] + once[name]), name  # each product rounded to bf16, sums not


def test_bf16_products_are_rounded_before_they_are_added_in_a_bf16_plane():
    experts = small_experts(dtype=torch.bfloat16)
    first, second = (random_batch((3, 0, 5, 2), dtype=torch.bfloat16) for _ in range(2))
    alone = []
    for batch in (first, second):
        forward_backward(experts, batch)
        alone.append(gradients(experts))
        drop_gradients(experts)
    forward_backward(experts, first)
    forward_backward(experts, second)
    for name, gradient in gradients(experts).items():
        assert gradient.equal(alone[0][name] + alone[1][name]), name


def test_an_expert_active_then_not_then_active_again_gets_the_last_gradient_alone():
    experts = small_experts(bias=True)
    steps = [random_batch((4, 1, 0, 0)), random_batch((0, 5, 0, 0)), random_batch((2, 0, 3, 0))]
    for batch, active in zip(steps, ([0, 1], [1], [0, 2]), strict=True):
        forward_backward(experts, batch)
        assert active_experts(experts) == active
        assert_gradients(experts, batch)
        drop_gradients(experts)
    assert active_experts(experts) == []
    experts.manager.check_integrity()


def test_backward_leaves_the_weights_alone():
    experts = small_experts(bias=True)
    before = experts.dense()
    forward_backward(experts, random_batch((4, 1, 0, 3)))
    for name, tensor in experts.dense().items():
        assert tensor.equal(before[name]), name


def test_backward_marks_the_gradient_pages_it_wrote_as_dirty():
    experts = small_experts()
    manager, table = experts.manager, experts.manager.table
    table.dirty[:] = False  # as if their bytes were on disk
    forward_backward(experts, random_batch((4, 0, 0, 3)))
    assert table.dirty[manager.ids(experts.pages, Plane.GRADIENT, [0, 3])].all()
    assert not table.dirty[manager.ids(experts.pages, Plane.WEIGHT, range(4))].any()


def test_two_modules_of_one_manager_keep_their_gradients_apart():
    first = small_experts(bias=True)
    second = small_experts(GELU, manager=first.manager)
    batches = [random_batch((4, 0, 2, 1)), random_batch((0, 3, 3, 0))]
    for _ in range(2):
        for experts, batch in zip((first, second), batches, strict=True):
            forward_backward(experts, batch)
    for experts, batch in zip((first, second), batches, strict=True):
        assert_gradients(experts, batch, batch)


@pytest.mark.parametrize("bias", [False, True], ids=["weights", "weights and biases"])
@pytest.mark.parametrize("activation", [SWIGLU, GELU], ids=["gated", "ungated"])
def test_norms_by_tensor_have_the_bits_of_stocks_tensors(activation, bias):
    experts = small_experts(activation, rows=FFN, bias=bias)
    forward_backward(experts, random_batch((3, 0, 5, 2)))
    found = ExpertGradients([experts])
    found.by_tensor = True
    found.finish(scale=0.3)
    for _ in range(2):
        dense = experts.dense(Plane.GRADIENT)
        expected = {
            (expert, 0): tuple(
                float(torch.norm(t)) for n, t in dense.items() if n.startswith(f"local_experts.{expert}.")
            )
            for expert in (0, 2, 3)
        }
        assert found.norms(experts, PageShards()) == expected, "an expert without tokens has none"
        squares = sum(norm**2 for norms in expected.values() for norm in norms)
        assert found.squares(PageShards()) == pytest.approx(squares, rel=1e-12)
        found.scale(1.7)  # they are taken anew: a scaled norm has not the bits of a scaled tensor's


def test_an_expert_of_several_pages_has_a_norm_a_page():
    experts = small_experts()
    forward_backward(experts, random_batch((3, 0, 0, 0)))
    found = ExpertGradients([experts])
    found.by_tensor = True
    found.finish()
    assert {name: len(norms) for name, norms in found.norms(experts, PageShards()).items()} == {
        (0, 0): 1,
        (0, 1): 1,
        (0, 2): 1,
    }

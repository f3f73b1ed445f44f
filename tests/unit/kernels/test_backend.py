"""Experts computed by kernels are the experts that autograd computes: every access checked, wherever waves end."""

import itertools
import os
from typing import get_args

import pytest
import torch

from megascale_omni.experts import function
from megascale_omni.experts.activation import Activation, Kind
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.tokens import sum_rows
from megascale_omni.kernels.backend import TritonBackend
from megascale_omni.paging import batches
from megascale_omni.paging.tiers import TierKind
from tests.unit.experts.paged import (
    FFN,
    GELU,
    HIDDEN,
    SWIGLU,
    Batch,
    drop_gradients,
    grad_of,
    gradients,
    leaf,
    paged,
    random_batch,
    small_experts,
)
from tests.unit.experts.reference import Tensors, reference, relative_error
from tests.unit.experts.test_tokens import index_of
from tests.unit.kernels.checker import checked

CPU = torch.device("cpu")
CLAMPED = Activation("quick_gelu", gated=True, clamp=0.5, offset=1.0)
ACTIVATIONS = [Activation(kind, gated=gated) for kind in get_args(Kind) for gated in (True, False)] + [CLAMPED]
ROUTINGS = {
    "uneven": (5, 0, 17, 3),
    "one token": (0, 1, 0, 0),
    "all to the first expert": (33, 0, 0, 0),
    "multiples of a tile": (16, 32, 16, 48),
    "none": (0, 0, 0, 0),
}
WHOLE = bool(os.environ.get("MEGASCALE_KERNELS_WHOLE"))
"""Every combination; the suite runs a sample in which every value occurs."""
CUTS: list[tuple[int, str | int]] = [(16, 11), (20, "backward")]  # rows a page (a short last one, equal ones), order
BF16 = [(SWIGLU, torch.float32), (GELU, False), (CLAMPED, torch.bfloat16), (SWIGLU, torch.bfloat16)]
if WHOLE:
    CUTS = list(itertools.product((16, 20, FFN), ("forward", "backward", 11)))
    BF16 = list(itertools.product(ACTIVATIONS, (torch.float32, torch.bfloat16, False)))
FORWARD = ["paged_fc1", "paged_slice_sum"]
BACKWARD = ["paged_activation_backward", "paged_weight_gradient", "paged_weight_gradient"]


def name_of(activation: Activation) -> str:
    return f"{activation.kind}-{'gated' if activation.gated else 'ungated'}{'-clamp' if activation.clamp else ''}"


def kernel_experts(activation: Activation = SWIGLU, **options) -> PagedExperts:
    return small_experts(activation, backend=TritonBackend(CPU, debug=True), **options)


def pages_of(experts: PagedExperts) -> list[torch.Tensor]:
    """The elements of every page that is in the arena now."""
    manager = experts.manager
    present = (manager.table.tier[: manager.numbering.num_pages] == TierKind.DEVICE).nonzero()[0]
    return [manager.page_tensor(int(page_id)) for page_id in present]


def errors(actual: Tensors, expected: Tensors) -> dict[str, float]:
    assert actual.keys() == expected.keys()
    return {name: relative_error(actual[name], expected[name]) for name in expected}


def assert_exact(activation: Activation, batch: Batch, *, order="forward", **options) -> None:
    experts = kernel_experts(activation, **options)
    expected = reference(experts.dense(), batch.x, batch.counts, batch.probs, batch.grad_y, activation)
    with checked(reachable=lambda: pages_of(experts), order=order):
        found = errors(paged(experts, batch), expected)
    # The gradient of a probability is one sum with cancellation: against a single number there is no norm to hide it.
    assert {name: error for name, error in found.items() if not error <= (1e-4 if name == "probs" else 1e-5)} == {}


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=name_of)
def test_fp32_every_kind_of_expert(activation):
    assert_exact(activation, random_batch((5, 0, 17, 3)), rows=FFN, bias=True)


@pytest.mark.parametrize(("rows", "order"), CUTS)
@pytest.mark.parametrize("counts", ROUTINGS.values(), ids=ROUTINGS.keys())
def test_fp32_every_routing_and_cut_in_any_order_of_programs(counts, rows, order):
    assert_exact(SWIGLU, random_batch(counts), rows=rows, order=order)
    if WHOLE:
        assert_exact(GELU, random_batch(counts, probs=False), rows=rows, order=order, bias=True)


def test_fp32_without_probabilities_and_ungated_with_an_odd_page():
    assert_exact(GELU, random_batch((7, 0, 1, 20), probs=False), rows=7)


@pytest.mark.parametrize(("activation", "probs"), BF16, ids=[f"{name_of(a)}-probs {p}" for a, p in BF16])
def test_bf16_loses_no_more_than_stock_in_two_halves(activation, probs):
    counts = (40, 0, 70, 3)
    batch = random_batch(counts, probs=probs, dtype=torch.bfloat16)
    experts = kernel_experts(activation, rows=16, bias=True, dtype=torch.bfloat16)
    args = (experts.dense(), batch.x, counts, batch.probs, batch.grad_y, activation)
    truth = reference(*args, dtype=torch.float32)
    control = errors(reference(*args, parts=2), truth)
    found = errors(paged(experts, batch), truth)
    assert {name: (found[name], control[name]) for name in found if not found[name] <= 1.5 * control[name]} == {}


def results(batch: Batch, seed: int, **options) -> Tensors:
    torch.manual_seed(seed)
    experts = kernel_experts(**options)
    first = paged(experts, batch)
    again = paged(experts, batch)  # gradients are added to the pages there are
    return first | {f"{name}, added": tensor for name, tensor in again.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_depends_on_where_waves_end(monkeypatch, seed, dtype):
    batch = random_batch((5, 0, 19, 3), dtype=dtype)
    options = {"rows": 16, "bias": True, "dtype": dtype, "gradient_dtype": torch.float32}
    found = []
    for pages in (1, 2, 100) if WHOLE else (1, 100):
        page_bytes = small_experts(rows=16, bias=True, dtype=dtype).layout.slot_class(dtype).nbytes
        monkeypatch.setattr(batches, "BATCH_BYTES", pages * page_bytes)
        found.append(results(batch, seed, **options))
    for other in found[1:]:
        for name, tensor in found[0].items():
            assert torch.equal(tensor.view(torch.int16), other[name].view(torch.int16)), name


def test_one_launch_a_product_serves_all_pages_of_a_wave():
    experts, batch = kernel_experts(rows=FFN), random_batch((5, 2, 17, 3))
    with checked(reachable=lambda: pages_of(experts)) as launched:
        paged(experts, batch)
    assert launched == [*FORWARD, *BACKWARD, "probs_gradient", "paged_slice_sum"]


BY_INDEX = {"two each": [[0, 1], [1, 3], [0, 3]] * 4, "some dropped": [[0], [], [0, 1, 2, 3], [2]], "none": [[], []]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("routes", BY_INDEX.values(), ids=BY_INDEX.keys())
def test_tokens_read_by_index_give_the_bits_of_their_rows_and_no_row_is_copied(monkeypatch, routes, dtype):
    experts = kernel_experts(bias=True, dtype=dtype)
    index, counts = index_of(routes)
    tokens, probs = torch.randn(len(routes), HIDDEN).to(dtype), torch.rand(len(index)).to(dtype)
    grad, found = torch.randn(len(routes), HIDDEN).to(dtype), []
    for by_index in (False, True):
        x, p = leaf(tokens), leaf(probs)
        if by_index:
            monkeypatch.setattr(function, "gather_rows", lambda *_: pytest.fail("rows of tokens are made"))
        with checked(reachable=lambda: pages_of(experts), order=3) as launched:
            if by_index:
                y = experts(x, counts, p, index)
            else:
                y = sum_rows(experts(x.index_select(0, index), counts, p), index, len(routes))
            y.backward(grad)
        assert launched.count("sum_rows") == (2 if by_index else 0)
        found.append({"y": y.detach(), "x": grad_of(x), "probs": grad_of(p), **gradients(experts)})
        drop_gradients(experts)
    assert [name for name, tensor in found[0].items() if not tensor.equal(found[1][name])] == []


def test_tokens_of_another_dtype_than_the_weights_are_refused():
    experts, batch = kernel_experts(), random_batch((5, 2, 17, 3), dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"tokens: dtype torch.bfloat16, the weights of this module have torch.float32"
    ):
        experts(batch.x, batch.counts, batch.probs)
    assert not experts.manager.table.pins.any()

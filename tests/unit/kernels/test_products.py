"""The paged products by themselves: gathered tokens, pages far apart, what is refused, what traps."""

import pytest
import torch

from megascale_omni.experts.activation import Activation
from megascale_omni.kernels.paged_activation_backward import launch_activation_backward
from megascale_omni.kernels.paged_fc1 import PageShape, launch_fc1
from megascale_omni.kernels.paged_slice_sum import launch_slice_sum
from megascale_omni.kernels.paged_weight_gradient import launch_weight_gradient
from megascale_omni.kernels.tiles import INTERPRETED
from megascale_omni.kernels.wave import WaveItem, WaveTables, wave_tables
from tests.unit.kernels.checker import checked

CPU = torch.device("cpu")
HIDDEN, NEURONS = 40, 24
SHAPE = PageShape(HIDDEN, Activation("silu", gated=True), bias=False)
COUNTS = (3, 18)


def pages(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Pages of ``[3, r, hidden]`` in memory of their own each, so that they have no common arena."""
    return [(torch.randn(3 * NEURONS * HIDDEN) / HIDDEN**0.5).to(dtype) for _ in range(count)]


def tables(weights: list[torch.Tensor], gradients: list[torch.Tensor] | None = None, **changes) -> WaveTables:
    items, row = [], 0
    for expert, count in enumerate(COUNTS):
        item = {
            "expert": expert,
            "slice": 0,
            "first_row": row,
            "rows": count,
            "block": row * NEURONS,
            "neurons": NEURONS,
            "weight_address": weights[expert].data_ptr(),
            "gradient_address": gradients[expert].data_ptr() if gradients else 0,
            "fresh": expert == 1,
        }
        items.append(WaveItem(**(item | changes)))
        row += count
    return wave_tables(items, last_slice=0, item_rows=16, chain_rows=16, device=CPU)


def fc1(x, wave, *, index=None, probs=None, pre=None, activated=None, debug=False):
    activated = torch.empty(wave.block, dtype=x.dtype) if activated is None else activated
    launch_fc1(
        x=x, probs=probs, index=index, pre=pre, activated=activated, wave=wave, shape=SHAPE, tile=INTERPRETED.fc1,
        debug=debug,
    )  # fmt: skip
    return activated


def weight_gradient(left, right, wave, *, index=None, gradient=torch.float32, rounded=True):
    launch_weight_gradient(
        left=left, right=right, index=index, gradient=gradient, wave=wave, shape=SHAPE, matrix="fc1",
        tile=INTERPRETED.weight_gradient, rounded=rounded,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_gathered_by_index_give_the_bits_of_permuted_ones(dtype):
    total = sum(COUNTS)
    x, weights, probs = torch.randn(9, HIDDEN).to(dtype), pages(2, dtype), torch.rand(total)
    index = torch.randint(9, (total,), dtype=torch.int32)
    wave = tables(weights)
    with checked(reachable=weights):
        gathered = fc1(x, wave, index=index, probs=probs)
    assert torch.equal(gathered, fc1(x[index], wave, probs=probs))
    left = torch.randn(total * 2 * NEURONS).to(dtype)
    made = []
    for right, by in ((x, index), (x[index], None)):
        gradients = pages(2)
        gradients[0].fill_(1.5)
        with checked(reachable=gradients):
            weight_gradient(left, right, tables(weights, gradients), index=by)
        made.append([page[: 2 * NEURONS * HIDDEN] for page in gradients])
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


def test_gradients_are_added_where_there_are_some_and_stored_where_they_are_fresh():
    left, x, weights, gradients = torch.randn(sum(COUNTS) * 2 * NEURONS), torch.randn(21, HIDDEN), pages(2), pages(2)
    gradients[1].fill_(float("nan"))  # fresh: what was there must not be read
    before, tail = gradients[0].clone(), gradients[1][2 * NEURONS * HIDDEN :]
    weight_gradient(left, x, tables(weights, gradients))
    cut = COUNTS[0] * 2 * NEURONS
    parts = ((left[:cut].view(-1, 2 * NEURONS), x[:3]), (left[cut:].view(-1, 2 * NEURONS), x[3:]))
    expected = [part.t() @ tokens for part, tokens in parts]
    fc1_of = [page[: 2 * NEURONS * HIDDEN].view(-1, HIDDEN) for page in (*gradients, before)]
    torch.testing.assert_close(fc1_of[0], fc1_of[2] + expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fc1_of[1], expected[1], rtol=1e-5, atol=1e-5)
    assert torch.equal(gradients[0][2 * NEURONS * HIDDEN :], before[2 * NEURONS * HIDDEN :])
    assert tail.isnan().all()


def test_parts_of_a_gradient_that_is_rounded_elsewhere_are_not_rounded():
    left, x = torch.randn(sum(COUNTS) * 2 * NEURONS).bfloat16(), torch.randn(21, HIDDEN).bfloat16()
    gradients = pages(2)
    weight_gradient(left, x, tables(pages(2, torch.bfloat16), gradients), rounded=False)
    cut = COUNTS[0] * 2 * NEURONS
    expected = left[cut:].view(-1, 2 * NEURONS).t().float() @ x[3:].float()
    found = gradients[1][: 2 * NEURONS * HIDDEN].view(-1, HIDDEN)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not found.equal(found.bfloat16().float())


def test_a_page_that_is_not_resident_is_refused_and_traps_in_the_kernel():
    weights = pages(2)
    with pytest.raises(ValueError, match=r"weight page of expert 0, slice 0: address 0, the page is not resident"):
        tables(weights, weight_address=0)
    with pytest.raises(
        ValueError, match=r"weight page of expert 0, slice 0: address 0x.*must be a multiple of 16 bytes"
    ):
        tables(weights, weight_address=weights[0].data_ptr() + 4)
    wave = tables(weights)
    wave.items[1, 0] = 0
    with pytest.raises(Exception, match=r"a page that is not resident is read"):
        fc1(torch.randn(21, HIDDEN), wave, debug=True)
    wave = tables(weights, pages(2))
    wave.items[0, 7] = 0
    with pytest.raises(Exception, match=r"a gradient page that is not resident is written"):
        weight_gradient(torch.randn(21 * 2 * NEURONS), torch.randn(21, HIDDEN), wave)


def test_what_does_not_fit_is_refused_by_name():
    weights = pages(2)
    wave, x = tables(weights), torch.randn(21, HIDDEN)
    with pytest.raises(ValueError, match=r"x: shape \(21, 39\), must be \(any, 40\)"):
        fc1(x[:, 1:].contiguous(), wave)
    with pytest.raises(ValueError, match=r"x: strides"):
        fc1(torch.randn(HIDDEN, 21).t(), wave)
    with pytest.raises(ValueError, match=r"x: dtype torch.float64"):
        fc1(x.double(), wave)
    with pytest.raises(ValueError, match=r"x: on meta, must be on cpu"):
        fc1(x.to("meta"), wave)
    with pytest.raises(ValueError, match=r"index: dtype torch.float32"):
        fc1(x, wave, index=torch.rand(21))
    with pytest.raises(ValueError, match=r"activated: 10 elements, the wave needs 504"):
        fc1(x, wave, activated=torch.empty(10))
    with pytest.raises(ValueError, match=r"pre: dtype torch.bfloat16, must be torch.float32"):
        fc1(x, wave, pre=torch.empty(1008, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"gradient: dtype torch.bfloat16, must be torch.float32 or torch.float32"):
        weight_gradient(torch.randn(1008), x, wave, gradient=torch.bfloat16)
    with pytest.raises(ValueError, match=r"left: 9 elements, the wave needs 1008"):
        weight_gradient(torch.randn(9), x, wave)
    carried = torch.empty(18, HIDDEN)
    with pytest.raises(ValueError, match=r"carried_in and carried_out: one buffer"):
        launch_slice_sum(
            left=torch.randn(504), out=x, carried_in=carried, carried_out=carried, wave=wave, shape=SHAPE,
            matrix="down", tile=INTERPRETED.slice_sum,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"partials: shape \(1, 21\), must be \(2, 21\)"):
        launch_activation_backward(
            grad_y=x, probs=torch.rand(21), pre=torch.randn(1008), activated=None, grad_pre=torch.empty(1008),
            partials=torch.empty(1, 21), wave=wave, shape=SHAPE, tile=INTERPRETED.activation_backward,
        )  # fmt: skip

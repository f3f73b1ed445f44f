"""The paged products by themselves: gathered tokens, pages far apart, what is refused, what traps."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megascale_omni.experts.activation import Activation
from megascale_omni.kernels.paged_activation_backward import launch_activation_backward
from megascale_omni.kernels.paged_fc1 import PageShape, launch_fc1
from megascale_omni.kernels.paged_slice_sum import launch_slice_sum
from megascale_omni.kernels.paged_weight_gradient import launch_weight_gradient
from megascale_omni.kernels.probs_gradient import launch_probs_gradient
from megascale_omni.kernels.tiles import INTERPRETED
from megascale_omni.kernels.wave import WaveItem, WaveTables, wave_tables
from tests.unit.kernels.checker import checked, quiet

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


def test_a_page_that_is_not_resident_is_refused():
    weights = pages(2)
    with pytest.raises(ValueError, match=r"weight page of expert 0, slice 0: address 0, the page is not resident"):
        tables(weights, weight_address=0)
    with pytest.raises(
        ValueError, match=r"weight page of expert 0, slice 0: address 0x.*must be a multiple of 16 bytes"
    ):
        tables(weights, weight_address=weights[0].data_ptr() + 4)


@pytest.mark.parametrize("launcher", ["fc1", "slice_sum", "activation_backward", "weight_gradient"])
def test_a_table_entry_that_is_not_resident_traps_in_the_kernel(launcher):
    wave = tables(KEPT[:2], KEPT[2:])
    wave.items[1, 7 if launcher == "weight_gradient" else 0] = 0
    with pytest.raises(Exception, match=r"a (gradient )?page that is not resident is (read|written)"):
        launches(wave=wave)[launcher]()


@pytest.mark.parametrize("bad", [21, -1])
@pytest.mark.parametrize("launcher", ["fc1", "activation_backward", "weight_gradient"])
def test_an_index_of_no_row_traps_and_without_debug_is_not_read(monkeypatch, launcher, bad):
    index = torch.arange(21)
    index[5] = bad
    tensors = {name: _given(name) for name in ("activated", "grad_pre")}
    with pytest.raises(Exception, match=r"index: a row that does not exist is read"):
        launches(index=index)[launcher]()
    quiet(monkeypatch)
    with checked(reachable=KEPT):
        launches(index=index, **tensors)[launcher]()
    if launcher == "weight_gradient":  # what was read for the forward is NaN already
        return
    wide = 1 if launcher == "fc1" else 2
    made = tensors["activated" if launcher == "fc1" else "grad_pre"][: 21 * wide * NEURONS]
    cut = COUNTS[0] * wide * NEURONS
    found = torch.cat([made[:cut].view(-1, wide * NEURONS), made[cut:].view(-1, wide * NEURONS)])
    assert found.isnan().all(1).nonzero().view(-1).tolist() == [5]


def _given(tensor: str) -> torch.Tensor:
    """What fits, by name; weight gradients have a ``wide`` left and a ``right``."""
    total, block = sum(COUNTS), sum(COUNTS) * NEURONS
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("x", "right", "grad_y", "out"), (total, HIDDEN)),
        **dict.fromkeys(("probs", "grad_probs"), (total,)),
        **dict.fromkeys(("pre", "grad_pre", "wide"), (2 * block,)),
        **dict.fromkeys(("left", "activated"), (block,)),
        **dict.fromkeys(("carried_in", "carried_out"), (18, HIDDEN)),
        "partials": (-(-NEURONS // INTERPRETED.fc1.n), total),
    }
    return torch.arange(total) if tensor == "index" else torch.randn(shapes[tensor])


KEPT = pages(4)
"""Tables have addresses only: somebody must keep the pages."""


def launches(**changes):
    """Every launcher of a product with what fits, but for the changes: name -> call."""
    wave, tile = changes.pop("wave", None) or tables(KEPT[:2], KEPT[2:]), changes.pop("tile", INTERPRETED.fc1)
    rows, common = changes.pop("rows", 16), {"wave": wave, "tile": tile}

    def of(launcher: str) -> dict[str, Any]:
        found = {name: changes[name] if name in changes else _given(name) for name in TAKES[launcher]}
        return {CALLED.get(name, name): value for name, value in found.items()} | common

    return {
        "fc1": lambda: launch_fc1(**of("fc1"), shape=SHAPE),
        "slice_sum": lambda: launch_slice_sum(**of("slice_sum"), shape=SHAPE, matrix="down"),
        "activation_backward": lambda: launch_activation_backward(**of("activation_backward"), shape=SHAPE),
        "weight_gradient": lambda: launch_weight_gradient(
            **of("weight_gradient"), gradient=torch.float32, shape=SHAPE, matrix="fc1"
        ),
        "probs_gradient": lambda: launch_probs_gradient(**of("probs_gradient"), rows=rows),
    }


TAKES = {
    "fc1": ("x", "index", "probs", "pre", "activated"),
    "slice_sum": ("left", "out", "carried_in", "carried_out"),
    "activation_backward": ("grad_y", "index", "probs", "pre", "activated", "grad_pre", "partials"),
    "weight_gradient": ("wide", "right", "index"),
    "probs_gradient": ("partials", "grad_probs"),
}
CALLED = {"wide": "left", "grad_probs": "out"}


def test_what_fits_is_taken():
    for launch in launches().values():
        launch()


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape and values, with gaps between them."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


@pytest.mark.parametrize(("launcher", "tensor"), [(name, tensor) for name, taken in TAKES.items() for tensor in taken])
def test_every_tensor_that_does_not_fit_is_refused_by_its_name(launcher, tensor):
    good = _given(tensor)
    name = CALLED.get(tensor, tensor)
    wrong = {
        "dtype": good.to(torch.float64),
        "device": good.to("meta"),
        "strides": strided(good),
        "end": good.reshape(-1)[:-1] if good.ndim == 1 else good[:-1],
    }
    if tensor == "carried_in" or tensor == "carried_out":  # nothing is cut here: any number of rows will do
        del wrong["end"]
    if tensor in ("x", "right", "grad_y"):
        launch = launches(**{tensor: good[:-1], "index": None})[launcher]
        with pytest.raises(ValueError, match=rf"^{name}: 20 rows, the wave needs 21"):
            launch()
        del wrong["end"]
    for what, bad in wrong.items():
        with pytest.raises(ValueError, match=rf"^{name}: ") as error:
            launches(**{tensor: bad})[launcher]()
        assert error.value.args, what


def test_waves_and_tiles_that_do_not_fit_each_other_are_refused():
    narrow = replace(INTERPRETED.fc1, m=32)
    for name, of in (("fc1", "tile"), ("slice_sum", "tile"), ("activation_backward", "tile")):
        with pytest.raises(ValueError, match=rf"^{of}: 32 rows a tile, the wave's tables are made for 16"):
            launches(tile=narrow)[name]()
    with pytest.raises(ValueError, match=r"^rows: 32 rows a tile"):
        launches(rows=32)["probs_gradient"]()
    with pytest.raises(ValueError, match=r"^gradient page of expert 0, slice 0: address 0, the page is not resident"):
        launches(wave=tables(pages(2)))["weight_gradient"]()
    weights = pages(2)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"expert": 0}, "expert 0, slice 0 comes after expert 0, slice 0; pages of a wave must ascend"),
        ({"rows": -1}, "has rows, a block or neurons that cannot be"),
        ({"neurons": 0}, "has rows, a block or neurons that cannot be"),
    ]
    for change, message in changes:
        with pytest.raises(ValueError, match=message):
            tables(weights, **change)
    cut = [WaveItem(0, 0, 0, 18, 0, NEURONS, weights[0].data_ptr(), weights[1].data_ptr())]
    wave = wave_tables(cut, last_slice=1, item_rows=16, chain_rows=16, device=CPU)
    with pytest.raises(ValueError, match=r"^carried_out: 17 rows, the wave needs 18"):
        launches(wave=wave, carried_out=torch.zeros(17, HIDDEN), left=torch.randn(18 * NEURONS))["slice_sum"]()
    whole = torch.zeros(36, HIDDEN)
    with pytest.raises(ValueError, match=r"carried_in and carried_out: one buffer"):
        launches(wave=wave, carried_in=whole[:18], carried_out=whole[10:28])["slice_sum"]()


def test_kernels_are_not_given_memory_that_they_cannot_reach(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(
        ValueError, match=r"^x: on cpu, kernels run on an accelerator \(on a CPU under TRITON_INTERPRET"
    ):
        launches()["fc1"]()


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
            grad_y=x, index=None, probs=torch.rand(21),
            pre=torch.randn(1008), activated=None, grad_pre=torch.empty(1008),
            partials=torch.empty(1, 21), wave=wave, shape=SHAPE, tile=INTERPRETED.activation_backward,
        )  # fmt: skip

"""More elements than 32 bits count: tokens, blocks and pages far apart, in memory that is mapped and never touched."""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megascale_omni.experts.activation import Activation
from megascale_omni.kernels.bf16_wire import pack_bf16, unpack_bf16
from megascale_omni.kernels.checks import require_offsets
from megascale_omni.kernels.paged_activation_backward import launch_activation_backward
from megascale_omni.kernels.paged_fc1 import PageShape, launch_fc1
from megascale_omni.kernels.paged_slice_sum import launch_slice_sum
from megascale_omni.kernels.paged_weight_gradient import launch_weight_gradient
from megascale_omni.kernels.permute_rows import permute, sum_by_token, unpermute
from megascale_omni.kernels.probs_gradient import launch_probs_gradient
from megascale_omni.kernels.tiles import INTERPRETED
from megascale_omni.kernels.wave import WaveItem, WaveTables, wave_tables
from tests.unit.kernels.checker import checked

HIDDEN, NEURONS, ROWS = 40, 24, 5
FAR = 2**31 // NEURONS + 3
"""The first token: 32 bits count neither the elements before it nor the neurons."""
SHAPE = PageShape(HIDDEN, Activation("silu", gated=True), bias=False)
NORESERVE = 0x4000


@contextmanager
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter copies what it was given back to where it was, which on a CPU is the same memory: all of it."""
    from triton.runtime.interpreter import GridExecutor

    with monkeypatch.context() as patch:
        patch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
        yield


def mapped(*shape: int) -> torch.Tensor:
    """fp32 zeros that take memory where they are written only."""
    numel = torch.Size(shape).numel()
    memory = mmap.mmap(-1, 4 * numel, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(memory, dtype=torch.float32, count=numel).view(shape)


def wave_at(first: int, page: torch.Tensor, gradient: torch.Tensor) -> WaveTables:
    """One page whose tokens begin with row ``first``, in the order of tokens and in the wave."""
    item = WaveItem(0, 0, first, ROWS, first * NEURONS, NEURONS, page.data_ptr(), gradient.data_ptr(), fresh=True)
    wave = wave_tables([item], last_slice=0, item_rows=16, chain_rows=16, device=torch.device("cpu"))
    wave.items[0, 4], wave.items[0, 5] = 0, first * NEURONS  # as if many pages came before it in the wave
    return wave


def test_products_of_tokens_that_lie_far(monkeypatch):
    page, tokens, back = torch.randn(3 * NEURONS * HIDDEN), torch.randn(ROWS, HIDDEN), torch.randn(ROWS, HIDDEN)
    probs, found = torch.rand(ROWS), []
    common: dict[str, Any] = {"shape": SHAPE, "tile": INTERPRETED.fc1}
    carried: dict[str, Any] = {"carried_in": torch.zeros(1, HIDDEN), "carried_out": torch.zeros(1, HIDDEN)}
    for first in (0, FAR):
        gradient, total = torch.zeros_like(page), first + ROWS
        x, gy, y = (mapped(total, HIDDEN) for _ in range(3))
        pre, dpre = (mapped(2 * total * NEURONS) for _ in range(2))
        act, p, dp = mapped(total * NEURONS), mapped(total), mapped(total)
        x[first:], gy[first:], p[first:] = tokens, back, probs
        partials, wave = torch.zeros(2, ROWS), wave_at(first, page, gradient)
        with untouched(monkeypatch), checked(reachable=[page, gradient]):
            launch_fc1(x=x, probs=p, index=None, pre=pre, activated=act, wave=wave, **common)
            launch_slice_sum(left=act, out=y, matrix="down", wave=wave, **carried, **common)
            launch_activation_backward(
                grad_y=gy, index=None, probs=p, pre=pre, activated=act, grad_pre=dpre, partials=partials, wave=wave,
                **common,
            )  # fmt: skip
            launch_probs_gradient(partials=partials, out=dp, wave=wave, rows=16, tile=INTERPRETED.fc1)
            launch_weight_gradient(
                left=dpre, right=x, index=None, gradient=torch.float32, wave=wave, matrix="fc1", **common
            )
        found.append([t.clone() for t in (y[first:], dp[first:], dpre[2 * first * NEURONS :], gradient)])
    for near, far in zip(*found, strict=True):
        assert near.any()
        assert torch.equal(near, far)


def test_rows_and_segments_that_lie_far(monkeypatch):
    rows = 2**31 // HIDDEN + 3
    x = mapped(rows, HIDDEN)
    x[-1] = torch.arange(1.0, HIDDEN + 1)
    index = torch.tensor([rows - 1, -1])
    with untouched(monkeypatch), checked():
        assert torch.equal(permute(x, index), torch.stack([x[-1], torch.zeros(HIDDEN)]))
        assert torch.equal(unpermute(x, index.view(1, 2)), x[-1:])
    wire, short = mapped(2**30 + 8).view(torch.bfloat16), torch.arange(1.0, 17.0)
    long = mapped(2**31)
    with monkeypatch.context() as patch:  # the block that matters, of two million
        from megascale_omni.kernels import bf16_wire

        cut = bf16_wire.blocks_of
        patch.setattr(bf16_wire, "blocks_of", lambda numels, block: cut(numels, block)[-1:])
        with untouched(monkeypatch), checked(reachable=[short]):
            pack_bf16([long, short], wire)
            unpack_bf16(wire, [long, short], add=True)
    assert torch.equal(wire[-16:].float(), torch.arange(1.0, 17.0))
    assert torch.equal(short, 2 * torch.arange(1.0, 17.0))


def test_sums_of_rows_that_lie_far(monkeypatch):
    rows = 2**31 // HIDDEN + 3
    y = mapped(rows, HIDDEN)
    y[-1], y[-2] = torch.arange(1.0, HIDDEN + 1), 1.0
    from megascale_omni.kernels import permute_rows

    # Sorting that many indices takes memory: the two rows of a token, and the first of all, which is zeros.
    order = torch.tensor([0, rows - 2, rows - 1])
    out = torch.empty(2, HIDDEN)
    with untouched(monkeypatch), checked():
        permute_rows.sum_rows[(2, 1)](y, order, torch.tensor([0, 0, 1, 3]), out, 3, 2, HIDDEN, BLOCK=permute_rows.BLOCK)
    assert torch.equal(out, torch.stack([torch.zeros(HIDDEN), torch.arange(2.0, HIDDEN + 2)]))
    assert torch.equal(sum_by_token(y[-2:], torch.tensor([0, 0]), 1), out[1:])


def test_a_page_that_32_bits_do_not_count_is_refused():
    require_offsets("page", 2**31 - 1)
    page = torch.zeros(16)
    wide = PageShape(2**20, SHAPE.activation, bias=False)
    item = WaveItem(0, 0, 0, 1, 0, 1024, page.data_ptr(), page.data_ptr())
    wave = wave_tables([item], last_slice=0, item_rows=16, chain_rows=16, device=torch.device("cpu"))
    x = torch.zeros(1, 2**20)
    with pytest.raises(ValueError, match=r"^page: 3222276096 elements, kernels count less than 2147483648"):
        launch_fc1(
            x=x, probs=None, index=None, pre=None, activated=torch.zeros(1024), wave=wave, shape=wide,
            tile=INTERPRETED.fc1,
        )  # fmt: skip

"""The checker sees what it is for: an access outside, two programs that meet, an order that shows."""

import pytest
import torch

from megascale_omni.kernels.interpreter import interpreted
from tests.unit.kernels.checker import checked

with interpreted():
    import triton
    import triton.language as tl

    @triton.jit
    def copy(x, out, n, SHIFT: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at + SHIFT, mask=(at < n) if MASKED else (at >= 0), other=0.0)
        tl.store(out + at, value, mask=at < n)

    @triton.jit
    def meet(out, ATOMIC: tl.constexpr):
        if ATOMIC:
            tl.atomic_add(out, 1.0)
        else:
            tl.store(out, tl.program_id(0).to(tl.float32))

    @triton.jit
    def twice(out):
        tl.store(out + tl.arange(0, 4) // 2, tl.arange(0, 4).to(tl.float32))

    @triton.jit
    def neighbours(x):
        at = tl.program_id(0)
        tl.store(x + at, tl.load(x + at + 1))

    @triton.jit
    def through(table, out):
        tl.store(out, tl.load(tl.load(table).to(tl.pointer_type(tl.float32))))


def test_an_access_behind_a_tensor_is_seen_though_memory_is_there():
    storage = torch.zeros(64)
    x, out = storage[:20], torch.zeros(20)
    with checked():
        copy[(2,)](x, out, 20, SHIFT=0, MASKED=True, BLOCK=16)
        with pytest.raises(Exception, match=r"program .1, 0, 0. loads 12 of 16 addresses outside every tensor"):
            copy[(2,)](x, out, 20, SHIFT=0, MASKED=False, BLOCK=16)
        with pytest.raises(Exception, match=r"loads 1 of 16 addresses outside"):
            copy[(1,)](x, out, 20, SHIFT=-1, MASKED=True, BLOCK=16)


def test_programs_that_meet_are_seen_unless_both_add_atomically():
    out = torch.zeros(1)
    with checked():
        meet[(3,)](out, ATOMIC=True)
        assert out.item() == 3
        with pytest.raises(Exception, match=r"program .1, 0, 0. stores what program .0, 0, 0. touched"):
            meet[(2,)](out, ATOMIC=False)
        with pytest.raises(Exception, match=r"loads what|stores what"):
            neighbours[(3,)](torch.zeros(4))
        with pytest.raises(Exception, match=r"stores twice"):
            twice[(1,)](torch.zeros(2))


@pytest.mark.parametrize(("order", "last"), [("forward", 3), ("backward", 0)])
def test_programs_run_in_the_order_asked_for(order, last, monkeypatch):
    monkeypatch.setattr("tests.unit.kernels.checker._Launch._meet", lambda *_: None)
    out = torch.zeros(1)
    with checked(order=order):
        meet[(4,)](out, ATOMIC=False)
    assert out.item() == last


def test_what_is_reached_through_a_table_must_be_named():
    page, out = torch.ones(1), torch.zeros(1)
    table = torch.tensor([page.data_ptr()])
    with checked(reachable=[page]):
        through[(1,)](table, out)
    assert out.item() == 1
    with checked(), pytest.raises(Exception, match=r"outside every tensor"):
        through[(1,)](table, out)

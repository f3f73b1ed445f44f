"""Pages stepped where their state lies: the same bits in host memory and on the device, and who chooses."""

import math
from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from megascale_omni.optimizer import rates as rates_module
from megascale_omni.optimizer.arithmetic import TorchAdamW, TorchFusedAdamW
from megascale_omni.optimizer.cuda_arithmetic import CudaAdam, CudaAdamW, fuses_multiply_add
from megascale_omni.optimizer.host_steps import HostSteps
from megascale_omni.optimizer.places import (
    Rates,
    Settled,
    StepBytes,
    faster,
    seconds_on_device,
    seconds_on_host,
    settle,
)
from megascale_omni.optimizer.rates import settle_for, unlike_on_host
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.copies import Copier, StreamCopier
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.paging.planes import Plane
from scripts.measurements.paging_model import Model, Task, Trained, batches_of, train
from tests.unit.paging.late_streams import LateStreams
from tests.unit.paging.movers import ManualMover

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32


def options(folder, *, device: float = 0.3, host: float = 1.0) -> PagingOptions:
    return PagingOptions(
        device_budget=Budget(fraction=device),
        host_budget=Budget(fraction=host),
        disk_path=folder,
        checksum="crc32",
    )


# -- bits --------------------------------------------------------------------------------------------------------------

TASKS = {
    "bf16, clipped": Task(dtype=BF16, steps=5),
    "bf16, stepped in the backward": Task(dtype=BF16, clip=0.0, steps=5),
    "fp32, clipped": Task(steps=5),
    "L2, seldom active": Task(decoupled=False, active=1, steps=6, max_lag=2, in_backward=False),
}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("streams", ["one memory", "late copies"])
def test_where_a_page_is_stepped_changes_no_bit(name, streams, tmp_path):
    task = replace(TASKS[name], in_host=True)
    copier = Copier() if streams == "one memory" else StreamCopier(LateStreams(3))
    mover = None if streams == "one memory" else ManualMover(3)
    found = train(task, options(tmp_path, host=0.6), mover=mover, copier=copier, check=True)
    assert not found.differs_from(train(TASKS[name]))
    assert found.counts["pages_stepped_in_host"] >= 10


@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_state_in_host_memory_stays_there_and_less_is_moved(tmp_path, clip):
    task = Task(dtype=BF16, steps=6, evaluate=False, clip=clip)
    moved = {}
    for in_host in (False, True):
        found = train(replace(task, in_host=in_host), options(tmp_path))
        moved[in_host] = found.counts["bytes_loaded"]
        assert ("pages_stepped_in_host" in found.counts) == in_host
    assert moved[True] < 0.7 * moved[False]


def test_state_on_disk_is_stepped_on_the_device(tmp_path):
    task = Task(dtype=BF16, steps=3, in_host=True)
    found = train(task, options(tmp_path, host=0.0))
    assert not found.differs_from(train(replace(task, in_host=False)))
    assert "pages_stepped_in_host" not in found.counts


def test_what_is_stepped_in_host_memory_neither_moves_nor_is_written_out_meanwhile(tmp_path, monkeypatch):
    task, seen = Task(dtype=BF16, steps=4, in_host=True), 0
    with batches_of(task):
        model = Model(task, options(tmp_path, host=0.3))
        pager = model.manager.pager
        step = model.adam._step_page

        def watched(experts, name, pages, *, clip):
            nonlocal seen
            lent = pager.host.lent
            seen += len(lent)
            for page_id in lent:
                assert page_id not in pager.host._farthest(model.manager.table.slot_class(page_id), count=1000)
                assert not pager.is_away(page_id)
            model.manager.check_integrity()
            if lent:
                with pytest.raises(RuntimeError, match="shrinks while pages in it are worked on"):
                    pager.host.shrink(model.manager.table.slot_class(next(iter(lent))))
                model.manager.resize(Budget(fraction=0.3), host=Budget(fraction=0.2))  # waits for the next step
            step(experts, name, pages, clip=clip)

        monkeypatch.setattr(model.adam, "_step_page", watched)
        found = Trained()
        for number in range(1, task.steps + 1):
            model.step(number, found)
        assert model.manager.options.host_budget == Budget(fraction=0.2)
        assert not pager.host.lent
        model.export(found)
        model.manager.close()
    assert seen > 10
    assert not found.differs_from(train(replace(task, in_host=False)))


def test_a_step_that_fails_lets_go_of_every_page(tmp_path, monkeypatch):
    task = Task(dtype=BF16, steps=4, in_host=True)
    with batches_of(task):
        copier = StreamCopier(LateStreams(1))
        model, found = Model(task, options(tmp_path), ManualMover(1), copier=copier), Trained()
        model.step(1, found)
        model.step(2, found)
        calls = []

        def fails(experts, name, pages, *, clip):
            calls.append(name)
            if len(calls) == 3:
                raise RuntimeError("no step today")

        monkeypatch.setattr(model.adam, "_step_page", fails)
        with pytest.raises(RuntimeError, match="no step today"):
            model.step(3, found)
        assert not model.manager.pager.host.lent
        assert not model.manager.table.pins.any()
        model.manager.check_integrity()
        model.manager.close()


# -- side by side ------------------------------------------------------------------------------------------------------


def test_the_next_gradient_comes_down_before_a_page_is_stepped_and_weights_go_up_behind_it():
    streams = LateStreams()
    steps, told = HostSteps(StreamCopier(streams)), []
    pages = []
    for number in range(4):
        state = {p: torch.full((8,), float(number)) for p in (Plane.MASTER, Plane.MOMENT1, Plane.MOMENT2)}
        pages.append({Plane.WEIGHT: torch.zeros(8, dtype=BF16), Plane.GRADIENT: torch.ones(8), **state})

    def work(number, tensors):
        told.append((number, len(streams.copies)))
        assert torch.equal(tensors[Plane.GRADIENT], torch.ones(8))
        tensors[Plane.MASTER].add_(tensors[Plane.GRADIENT])
        tensors[Plane.WEIGHT].copy_(tensors[Plane.MASTER])

    gone: list[int] = []
    for number, page in enumerate(pages):
        here = (Plane.MASTER, Plane.MOMENT1, Plane.MOMENT2)
        steps.step(page, partial(work, number), here=here, let_go=partial(gone.append, number))
        assert gone == list(range(number)), "the page at hand waits for its gradient"
    steps.finish()
    assert gone == [0, 1, 2, 3]
    # Copies made before each step: its own gradient, the next one's, and the weights of those before.
    assert told == [(0, 2), (1, 4), (2, 6), (3, 7)]
    assert streams.compute_waited == 0, "whoever leases a weight waits for it"
    ups = [copied for copied in streams.copies if len(copied.pairs) == 1 and copied.pairs[0][1].dtype is BF16]
    for number, copied in enumerate(ups):
        streams.host_waits(copied.event)
        assert torch.equal(pages[number][Plane.WEIGHT], torch.full((8,), number + 1.0, dtype=BF16))
    assert len(ups) == 4


# -- who chooses -------------------------------------------------------------------------------------------------------

SPEED = st.floats(1e9, 1e13)
RATES = st.builds(Rates, to_device=SPEED, to_host=SPEED, host_step=SPEED, device_step=SPEED)
NUMBERS = st.builds(
    StepBytes.of, weight=st.sampled_from([BF16, FP32]), gradient=st.sampled_from([BF16, FP32])
)  # fmt: skip
MIXED = StepBytes.of(weight=BF16, gradient=FP32)
PCIE_5 = Rates(to_device=5.5e10, to_host=5.5e10, host_step=2.2e11, device_step=2.8e12)
C2C = Rates(to_device=3.7e11, to_host=3.0e11, host_step=2.2e11, device_step=3.2e12)


def test_a_slow_link_favours_the_host_and_a_fast_one_the_device():
    assert faster(PCIE_5, MIXED) == "host"
    assert faster(C2C, MIXED) == "device"
    assert faster(PCIE_5, StepBytes.of(weight=FP32, gradient=FP32)) == "host"


@given(RATES, NUMBERS, st.floats(1.0, 100.0))
def test_the_choice_follows_what_is_faster(rates, numbers, factor):
    place = faster(rates, numbers)
    host, device = seconds_on_host(rates, numbers), seconds_on_device(rates, numbers)
    assert 0 < min(host, device) < math.inf
    assert (place == "host") == (host <= device)
    if place == "host":
        assert faster(replace(rates, host_step=rates.host_step * factor), numbers) == "host"
        assert faster(replace(rates, device_step=rates.device_step / factor), numbers) == "host"
    else:
        assert faster(replace(rates, device_step=rates.device_step * factor), numbers) == "device"
        assert faster(replace(rates, host_step=rates.host_step / factor), numbers) == "device"


@given(RATES, NUMBERS, st.floats(1.0, 100.0))
def test_a_slower_link_never_sends_more_over_it(rates, numbers, factor):
    """A step in host memory moves less either way, so that the link alone never speaks against it."""
    assert numbers.down <= numbers.moved
    assert numbers.weight <= numbers.moved
    slower = replace(rates, to_device=rates.to_device / factor, to_host=rates.to_host / factor)
    if faster(rates, numbers) == "host":
        assert faster(slower, numbers) == "host"


@given(RATES, NUMBERS, st.sampled_from([2.0**-4, 2.0**6]))
def test_a_machine_that_is_faster_in_all_is_no_other_machine(rates, numbers, factor):
    scaled = Rates(*(value * factor for value in vars(rates).values()))
    assert faster(scaled, numbers) == faster(rates, numbers)


def test_bytes_of_a_step():
    assert (MIXED.down, MIXED.weight, MIXED.moved, MIXED.touched) == (4, 2, 12, 30)
    same = StepBytes.of(weight=FP32, gradient=FP32)
    assert (same.down, same.weight, same.moved, same.touched) == (8, 4, 8, 28)


def settled(choice, **changes) -> Settled:
    return settle(choice, **({"unlike": None, "rates": PCIE_5, "numbers": MIXED} | changes))


def test_what_choices_come_to():
    assert settled("auto").place == "host"
    assert "ns a parameter" in settled("auto").why
    assert settled("auto", rates=C2C).place == "device"
    assert settled("auto", rates=None).place == "host"
    assert settled("host", rates=C2C).place == "host"
    assert settled("device", rates=None).place == "device"
    assert settled("auto", unlike="it rounds").place == "device"
    assert settled("device", unlike="it rounds").place == "device"
    with pytest.raises(ValueError, match=r"compute\.optimizer_device=host would change bits: it rounds; use device"):
        settled("host", unlike="it rounds")
    assert settled("auto", host_slots=False).place == "device"
    for choice in ("host", "device"):
        with pytest.raises(ValueError, match=rf"compute\.optimizer_device={choice} has no effect: no page is ever in"):
            settled(choice, host_slots=False)


def test_only_an_arithmetic_with_the_same_bits_on_both_may_be_stepped_on_both(monkeypatch):
    cuda = torch.device("cuda")
    assert unlike_on_host(TorchFusedAdamW(), CPU) is None
    for arithmetic in (TorchAdamW(), TorchFusedAdamW()):
        assert "rounds otherwise" not in str(unlike_on_host(arithmetic, CPU))
        assert "round otherwise on cuda" in str(unlike_on_host(arithmetic, cuda))
    monkeypatch.setattr(rates_module, "fuses_multiply_add", lambda: True)
    assert unlike_on_host(CudaAdamW(kernels=True), cuda) is None
    assert unlike_on_host(CudaAdam(kernels=False), cuda) is None
    monkeypatch.setattr(rates_module, "fuses_multiply_add", lambda: False)
    assert "no fused multiply-add" in str(unlike_on_host(CudaAdamW(kernels=True), cuda))
    assert isinstance(fuses_multiply_add(), bool)


def test_the_choice_of_a_run_is_settled_from_its_budgets_and_said(tmp_path, caplog):
    task = Task(modules=1, experts=6)
    with batches_of(task):
        model = Model(task, options(tmp_path))
        with caplog.at_level("INFO"):
            assert settle_for("auto", modules=model.modules, arithmetic=TorchAdamW()).place == "host"
        assert "are stepped where they lie: device and host are one memory" in caplog.text
        model.manager.close()
        model = Model(task, options(tmp_path, host=0.0))
        assert settle_for("auto", modules=model.modules, arithmetic=TorchAdamW()).place == "device"
        with pytest.raises(ValueError, match="no page is ever in host memory here"):
            settle_for("host", modules=model.modules, arithmetic=TorchAdamW())
        model.manager.close()
    assert settle_for("host", modules=[], arithmetic=TorchAdamW()).place == "device"

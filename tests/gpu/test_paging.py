"""Pages on an accelerator: where they are, how they come and where they are stepped change no bit."""

from dataclasses import replace

import pytest
import torch

from megascale_omni.optimizer.arithmetic import arithmetic_for
from megascale_omni.optimizer.places import StepBytes
from megascale_omni.optimizer.rates import measured_rates, settle_for
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.copies import StreamCopier
from megascale_omni.paging.layout import SlotClass
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.paging.pinned import PinningFailed, Registrations, cuda_runtime
from megascale_omni.paging.streams import CudaStreams, Way
from megascale_omni.paging.tiers import SEGMENT_BYTES, Arena, TierKind
from scripts.measurements.paging_model import Model, Task, Trained, batches_of, train

CUDA = torch.device("cuda")
CPU = torch.device("cpu")
TASK = Task(device="cuda", dtype=torch.bfloat16, steps=6)
SLOT = SlotClass(torch.float32, SEGMENT_BYTES // 16)  # four in a segment


def options(folder, *, device: float = 0.3, host: float = 1.0) -> PagingOptions:
    return PagingOptions(Budget(fraction=device), Budget(fraction=host), folder, checksum="crc32")


# -- a training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.5, 0.0])
@pytest.mark.parametrize("in_host", [True, False])
@pytest.mark.parametrize("host", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("kernels", [True, False])
def test_tiers_and_places_change_no_bit(tmp_path, kernels, host, in_host, clip):
    task = replace(TASK, clip=clip, kernels=kernels)
    found = train(replace(task, in_host=in_host), options(tmp_path, host=host), check=True)
    assert not found.differs_from(train(task))
    assert ("pages_stepped_in_host" in found.counts) == (in_host and host > 0)


def test_the_choice_of_this_machine_is_made_from_its_rates_and_changes_no_bit(tmp_path, caplog):
    arithmetic = arithmetic_for(decoupled=True, fused=False, device=CUDA)
    rates = measured_rates(arithmetic, CUDA, StepBytes.of(weight=torch.bfloat16, gradient=torch.float32))
    assert min(vars(rates).values()) > 1e8
    with batches_of(TASK), caplog.at_level("INFO"):
        model = Model(TASK, options(tmp_path))
        settled = settle_for("auto", modules=model.modules, arithmetic=arithmetic)
        assert settled.place in ("host", "device")
        assert "ns a parameter" in caplog.text
        model.manager.close()


def test_budgets_may_change_while_a_training_goes_on(tmp_path):
    found = Trained()
    with batches_of(TASK):
        model = Model(replace(TASK, in_host=True), options(tmp_path))
        for number in range(1, TASK.steps + 1):
            model.step(number, found)
            model.manager.check_integrity()
            shares = (0.3, 0.2) if number % 2 else (0.5, 1.0)
            model.manager.resize(Budget(fraction=shares[0]), host=Budget(fraction=shares[1]))
        model.export(found)
        pinned = model.manager.pager.tiers.host
        assert pinned.bytes_pinned == pinned.bytes_reserved
        model.manager.close()
        assert pinned.bytes_pinned == 0
    assert not found.differs_from(train(TASK))


# -- pinned segments ---------------------------------------------------------------------------------------------------


def test_segments_are_page_locked_while_they_are_there():
    host = Arena(device=CPU, kind=TierKind.HOST, pin=cuda_runtime())
    slots = [host.tensor(SLOT, host.allocate(SLOT)) for _ in range(5)]
    assert all(slot.is_pinned() for slot in slots)
    assert host.bytes_pinned == 2 * SEGMENT_BYTES
    device = torch.empty_like(slots[0], device=CUDA)
    slots[4].fill_(3.0)
    device.copy_(slots[4], non_blocking=True)
    torch.cuda.synchronize()
    assert bool((device == 3.0).all())
    host.release()
    assert not any(slot.is_pinned() for slot in slots)


def test_what_the_runtime_refuses_has_its_number():
    registrations = Registrations(cuda_runtime())
    memory = torch.empty(1 << 20, dtype=torch.uint8)
    registrations.add(memory.data_ptr(), memory.numel())
    try:
        with pytest.raises(PinningFailed, match="failed with CUDA error 712"):
            registrations.add(memory.data_ptr(), memory.numel())
    finally:
        registrations.remove_all()


# -- streams -----------------------------------------------------------------------------------------------------------

LONG = 200_000_000
"""Cycles that a kernel sleeps: some tenths of a second, in which everything else has long been issued."""


def test_a_copy_waits_for_compute_and_compute_for_the_copy_and_the_host_for_neither():
    streams = CudaStreams(CUDA)
    copier = StreamCopier(streams)
    host = torch.full((1 << 20,), 2.0).pin_memory()
    slot = torch.zeros(1 << 20, device=CUDA)
    torch.cuda._sleep(LONG)
    before = slot.clone()  # reads the slot when the kernel before it has ended
    copier.released([slot])
    copier.load([(host, slot)])
    copier.acquired([slot])
    after = slot.clone()
    end = torch.cuda.Event()
    end.record()
    assert not end.query(), "all of it was issued while the first kernel ran"
    end.synchronize()
    assert bool((before == 0.0).all())
    assert bool((after == 2.0).all())


def test_both_ways_go_on_beside_compute():
    streams = CudaStreams(CUDA)
    host = [torch.full((1 << 20,), float(n)).pin_memory() for n in range(2)]
    device = [torch.full((1 << 20,), 5.0, device=CUDA) for _ in range(2)]
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    busy = streams.mark()
    up = streams.copy([(host[1], device[1])], Way.UP, after=[])
    down = streams.copy([(device[0], host[0])], Way.DOWN, after=[])
    streams.host_waits(up)
    streams.host_waits(down)
    assert not busy.query(), "compute had not ended"
    assert bool((host[0] == 5.0).all())
    torch.cuda.synchronize()
    assert bool((device[1] == 1.0).all())


# -- CUDA graphs -------------------------------------------------------------------------------------------------------


def test_a_graph_of_what_is_around_experts_is_replayed_between_them():
    with batches_of(TASK):
        model = Model(replace(TASK, modules=2), PagingOptions())
    first, second = model.modules
    hidden = TASK.hidden
    norm = torch.nn.LayerNorm(hidden, device=CUDA, dtype=TASK.dtype)
    x = torch.randn(TASK.tokens, hidden, device=CUDA).to(TASK.dtype)
    counts = [TASK.tokens // TASK.experts] * TASK.experts
    with torch.no_grad():
        expected = second(norm(first(x, counts, None)), counts, None)
        around = torch.cuda.make_graphed_callables(norm, (torch.zeros_like(x, requires_grad=True),))
        for _ in range(3):
            found = second(around(first(x, counts, None)), counts, None)
            assert torch.equal(found, expected)

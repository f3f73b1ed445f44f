"""Pages stepped by the kernel have the bits of the same arithmetic in host memory, missed steps and all."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from megascale_omni.kernels import paged_adam
from megascale_omni.kernels.paged_adam import launch_adam
from megascale_omni.optimizer.arithmetic import AdamSegment
from megascale_omni.optimizer.cuda_arithmetic import CudaAdam, CudaAdamW, fuses_multiply_add
from megascale_omni.optimizer.history import StepRecord
from megascale_omni.paging.planes import Plane
from scripts.measurements.paging_adam import CASES, Case, Pair, pair_of
from tests.unit.optimizer.test_arithmetic import assert_same_bits, records

KINDS = pytest.mark.parametrize("kind", [CudaAdamW, CudaAdam], ids=lambda kind: kind.name)
pytestmark = pytest.mark.skipif(not fuses_multiply_add(), reason="a processor without fused multiply-add")


def state(numel: int) -> dict[str, torch.Tensor]:
    return {
        "p": torch.randn(numel),
        "m": torch.randn(numel) * 0.1,
        "v": torch.rand(numel) * 10.0 ** torch.randint(-42, 2, (numel,)),
    }


def copy_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@KINDS
@pytest.mark.parametrize("numel", [1, 1023, 1024, 2500])
def test_a_step_after_missed_ones_has_the_bits_of_the_host(kind, numel):
    on_host, by_kernel, g = state(numel), {}, torch.randn(numel)
    by_kernel = copy_of(on_host)
    history = records(17)
    host, kernel = kind(kernels=False), kind(kernels=True)
    for first, last in ((0, 1), (1, 6), (6, 17)):
        host.replay(**on_host, records=history[first : last - 1])
        host.step(**on_host, g=g, record=history[last - 1])
        kernel.advance(**by_kernel, g=g, records=history[first:last])
        for name, tensor in on_host.items():
            assert_same_bits(by_kernel[name], tensor, f"{name} after step {last}")


def reference_step(p, m, v, g, record: StepRecord, decoupled: bool) -> tuple[np.ndarray, ...]:
    """A step written with exact products and sums (float64 holds them) and one rounding where the formula has one."""
    from triton._C.libtriton import interpreter

    def fma(x, y, z):
        return interpreter.fma_fp32(*np.broadcast_arrays(np.float32(x), np.float32(y), np.float32(z)))

    f32 = np.float32
    if record.weight_decay:
        if decoupled:
            p = p * f32(1 - record.lr * record.weight_decay)
        else:
            g = fma(record.weight_decay, p, g)
    m = fma(1 - record.beta1, g - m, m)
    v = fma(1 - record.beta2, g * g, v * f32(record.beta2))
    bias1, bias2 = 1 - record.beta1**record.step, 1 - record.beta2**record.step
    root = np.sqrt(v) / f32(bias2**0.5) + f32(record.eps)
    return fma(-(record.lr / bias1), m / root, p), m, v


@KINDS
def test_both_are_the_formula_rounded_where_it_says(kind):
    tensors, g = state(700), torch.randn(700)
    record = StepRecord(step=7, lr=3e-3, weight_decay=0.1, beta1=0.9, beta2=0.999, eps=1e-8)
    p, m, v = (tensor.numpy() for tensor in tensors.values())
    expected = reference_step(p, m, v, g.numpy(), record, kind.decoupled)
    for kernels in (False, True):
        found = copy_of(tensors)
        kind(kernels=kernels).step(**found, g=g, record=record)
        for name, tensor in zip("pmv", expected, strict=True):
            assert_same_bits(found[name], torch.from_numpy(tensor), f"{name}, kernels={kernels}")


def test_segments_of_many_pages_are_stepped_in_one_launch_each_with_its_own_steps():
    history = records(9)
    pages = [state(numel) for numel in (40, 1500, 8)]
    expected, gradients = (
        [copy_of(page) for page in pages],
        [torch.randn(40).bfloat16(), None, torch.randn(8).bfloat16()],
    )
    weights = [torch.empty(page["p"].numel(), dtype=torch.bfloat16) for page in pages]
    steps = [history[3:4], history[:9], history[2:5]]
    clip = 0.37
    launch_adam(
        [
            AdamSegment(**page, g=g, weight=weight, records=r)
            for page, g, weight, r in zip(pages, gradients, weights, steps, strict=True)
        ],
        decoupled=True,
        clip=clip,
    )
    host = CudaAdamW(kernels=False)
    for page, wanted, g, weight, r in zip(pages, expected, gradients, weights, steps, strict=True):
        host.advance(**wanted, g=None if g is None else g.float().mul_(clip), records=r)
        for name, tensor in wanted.items():
            assert_same_bits(page[name], tensor, name)
        assert torch.equal(weight, wanted["p"].bfloat16())


def test_pages_that_are_behind_share_the_steps_that_they_missed():
    one, two = records(40), records(5)
    odd = (*one[30:39], replace(one[39], lr=1.0))
    lags = [one[-lag:] for lag in (3, 40, 17, 3)] + [two, two[2:], odd, odd[-1:], ()]
    table = paged_adam._Records(sorted(lags, key=len, reverse=True))
    assert len(table.table()) == len(one) + len(two) + len(odd)
    for lag in lags:
        alone = paged_adam._Records([lag]).table()
        first = table.place(lag)
        assert np.array_equal(table.table()[first : first + len(lag)].reshape(alone.shape), alone)


def test_moments_that_do_not_exist_are_zeros_and_stay_away():
    page, history = state(50), records(4)
    expected = page["p"].clone()
    zeros = torch.zeros(50)
    CudaAdamW(kernels=False).replay(p=expected, m=zeros.clone(), v=zeros.clone(), records=history)
    launch_adam([AdamSegment(p=page["p"], m=None, v=None, records=history)], decoupled=True)
    assert_same_bits(page["p"], expected, "p")


def test_non_finite_gradients_do_what_the_host_does():
    on_host = state(6)
    by_kernel = copy_of(on_host)
    g = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e30])
    for record in records(3):
        CudaAdamW(kernels=False).step(**on_host, g=g, record=record)
        CudaAdamW(kernels=True).step(**by_kernel, g=g, record=record)
    for name, tensor in on_host.items():
        assert_same_bits(by_kernel[name], tensor, name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m": torch.zeros(9)}, "m: 9 elements, must be 8"),
        ({"v": torch.zeros(8, dtype=torch.float64)}, "v: dtype torch.float64"),
        ({"p": torch.zeros(16)[::2]}, "p: strides"),
        ({"m": None}, "m and v: one is missing"),
        ({"g": torch.zeros(8, dtype=torch.int32)}, "g: dtype torch.int32"),
        ({"m": None, "v": None, "g": torch.zeros(8)}, "g: a gradient needs m and v"),
        ({"weight": torch.zeros(8, dtype=torch.float64)}, "weight: dtype torch.float64"),
        ({"weight": torch.zeros(7)}, "weight: 7 elements, must be 8"),
        ({"v": torch.zeros(16)[::2]}, "v: strides"),
        ({"m": torch.zeros(8, device="meta")}, "m: on meta, must be on cpu like p"),
        ({"g": torch.zeros(8, device="meta")}, "g: on meta, must be on cpu like p"),
        (dict.fromkeys("pmv", torch.zeros(8, device="meta")), "p: on meta, kernels run on an accelerator"),
        ({"p": torch.zeros(8, dtype=torch.bfloat16)}, "p: dtype torch.bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    page = {name: torch.zeros(8) for name in "pmv"} | change
    with pytest.raises(ValueError, match=message):
        launch_adam([AdamSegment(**page, records=records(1))], decoupled=True)


def test_a_clip_coefficient_is_a_number():
    page, coefficient = {name: torch.zeros(8) for name in "pmv"}, cast(float, torch.ones(1))
    with pytest.raises(ValueError, match="clip: Tensor, must be a number"):
        launch_adam([AdamSegment(**page, g=torch.ones(8), records=records(1))], decoupled=True, clip=coefficient)


def trained(kernels: bool, folder) -> dict[str, torch.Tensor]:
    """Weights and moments after steps in which experts are seldom active, under the smallest budget."""
    with pair_of(CASES["AdamW bf16"], folder) as pair:
        pair.adam.arithmetic = CudaAdamW(kernels=kernels)
        for step in range(8):
            pair.step([step % 3, 5] if step % 4 else [])
        assert min(pair.last_steps) < 8  # some pages are behind
        planes = (Plane.WEIGHT, Plane.MASTER, Plane.MOMENT1, Plane.MOMENT2)
        return {f"{plane.name} {n}": t for plane in planes for n, t in pair.adam.dense(pair.experts, plane).items()}


def test_deferred_steps_by_the_kernel_are_those_of_the_host(tmp_path):
    by_kernel, on_host = trained(True, tmp_path), trained(False, tmp_path)
    for name, tensor in on_host.items():
        assert torch.equal(by_kernel[name], tensor), name


RESIDENT = [replace(CASES["AdamW bf16 lag 7"], max_lag=2), Case(decoupled=False, max_lag=2, paged=False)]


@pytest.mark.parametrize("case", RESIDENT, ids=["AdamW bf16", "L2 fp32"])
def test_all_pages_of_a_module_take_their_steps_in_one_launch(monkeypatch, case, tmp_path):
    kind, found, launches = CudaAdamW if case.decoupled else CudaAdam, [], []
    plain = paged_adam.launch_adam

    def launched(segments: Sequence[AdamSegment], **options: Any) -> None:
        launches.append([len(segment.records) for segment in segments])
        plain(segments, **options)

    monkeypatch.setattr(paged_adam, "launch_adam", launched)
    for kernels in (False, True):
        with pair_of(case, tmp_path) as pair:
            pair.adam.arithmetic = kind(kernels=kernels)
            for step in range(5):
                before = len(launches)
                pair.step([step % 3, 5] if step % 4 else [], clip=0.7 if step % 2 else None)
                assert len(launches) - before <= kernels
            steps = list(launches)
            planes = (Plane.WEIGHT, Plane.MOMENT1, Plane.MOMENT2)
            found.append({f"{p.name} {n}": t for p in planes for n, t in pair.adam.dense(pair.experts, p).items()})
    for name, tensor in found[1].items():
        assert torch.equal(tensor, found[0][name]), name
    assert len(steps) >= 3
    assert max(len(set(counts)) for counts in steps) > 1, "each page its own steps"


def test_pages_in_host_memory_are_stepped_there_by_whoever_has_kernels(monkeypatch):
    on_host, with_kernels, g = state(700), {}, torch.randn(700)
    with_kernels = copy_of(on_host)
    CudaAdamW(kernels=False).step(**on_host, g=g, record=records(1)[0])
    monkeypatch.delenv("TRITON_INTERPRET")  # as in a run: kernels do not reach this memory
    CudaAdamW(kernels=True).step(**with_kernels, g=g, record=records(1)[0])
    for name, tensor in on_host.items():
        assert_same_bits(with_kernels[name], tensor, name)


class ByPlace(CudaAdamW):
    """The kernel for pages in the device arena, the host's operations for those that are lent by host memory."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(kernels=True)
        self._pair, self.steps = pair, {True: 0, False: 0}
        self._host = CudaAdamW(kernels=False)

    def advance(self, *, p, m, v, g, records) -> None:
        pager = self._pair.manager.pager
        slots = [pager.tiers.host.tensor(pager.table.slot_class(i), int(pager.table.slot[i])) for i in pager.host.lent]
        in_host = any(0 <= m.data_ptr() - slot.data_ptr() < slot.numel() * slot.element_size() for slot in slots)
        self.steps[in_host] += 1
        if in_host:
            self._host.advance(p=p, m=m, v=v, g=g, records=records)
        else:
            super().advance(p=p, m=m, v=v, g=g, records=records)


def test_one_arithmetic_wherever_a_page_is_stepped(tmp_path):
    """Pages change places between steps; what is stepped by the kernel and by the host has the bits of one of them."""
    case = replace(CASES["AdamW bf16"], in_host=True)
    found = []
    for by_place in (True, False):
        with pair_of(case, tmp_path) as pair:
            arithmetic = ByPlace(pair) if by_place else CudaAdamW(kernels=False)
            pair.adam.arithmetic = arithmetic
            for step in range(10):
                pair.step([step % 3, 5] if step % 4 else [], clip=0.7 if step % 2 else None)
            if isinstance(arithmetic, ByPlace):
                assert min(arithmetic.steps.values()) >= 5, arithmetic.steps
            planes = (Plane.WEIGHT, Plane.MASTER, Plane.MOMENT1, Plane.MOMENT2)
            found.append({f"{p.name} {n}": t for p in planes for n, t in pair.adam.dense(pair.experts, p).items()})
    for name, tensor in found[1].items():
        assert torch.equal(found[0][name], tensor), name

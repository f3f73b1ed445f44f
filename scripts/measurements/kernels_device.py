"""Kernels on an accelerator: what the rows K5 to K9 of `kernels` time. Medians of timed launches, warmed up before."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megascale_omni.experts.activation import Activation
from megascale_omni.kernels.paged_adam import launch_adam
from megascale_omni.kernels.paged_fc1 import PageShape, launch_fc1
from megascale_omni.kernels.tiles import product_tiles
from megascale_omni.kernels.wave import WaveItem, wave_tables
from megascale_omni.optimizer.arithmetic import AdamSegment
from megascale_omni.optimizer.history import StepRecord
from megascale_omni.paging.copies import StreamCopier
from megascale_omni.paging.layout import MIB, SlotClass
from megascale_omni.paging.pinned import cuda_runtime
from megascale_omni.paging.segments import largest_segment
from megascale_omni.paging.streams import CudaStreams
from megascale_omni.paging.tiers import Arena, TierKind

HIDDEN, NEURONS, EXPERTS = 4096, 1024, 8
PAGE_BYTES = 16 * MIB
_WARMUP, _REPETITIONS = 5, 21
_SWIGLU = Activation("silu", gated=True)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def seconds_of(work: Callable[[], object]) -> float:
    """Median seconds of ``work`` on the device."""
    for _ in range(_WARMUP):
        work()
    times = []
    for _ in range(_REPETITIONS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)


def _copy_bytes_per_second() -> float:
    source = torch.empty(512 * MIB, dtype=torch.uint8, device=_device())
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source))


def _matmul_flops_per_second() -> float:
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=_device())
    out = torch.empty_like(a)
    return 2 * 8192**3 / seconds_of(lambda: torch.mm(a, a, out=out))


def product_ratio(*, tokens: int, other: str) -> float:
    """K5: how fast the paged first product is, against ``grouped_mm`` or the ceiling that its bytes and FLOPs have."""
    device, dtype, total = _device(), torch.bfloat16, tokens * EXPERTS
    x = torch.randn(total, HIDDEN, dtype=dtype, device=device)
    pages = torch.randn(EXPERTS, 3 * NEURONS * HIDDEN, dtype=dtype, device=device) / HIDDEN**0.5
    items = [
        WaveItem(e, 0, e * tokens, tokens, e * tokens * NEURONS, NEURONS, pages[e].data_ptr()) for e in range(EXPERTS)
    ]
    tile = product_tiles(dtype, device).fc1
    wave = wave_tables(items, last_slice=0, item_rows=tile.m, chain_rows=tile.m, device=device)
    pre, activated = x.new_empty(total * 2 * NEURONS), x.new_empty(total * NEURONS)
    shape = PageShape(HIDDEN, _SWIGLU, bias=False)
    paged = seconds_of(
        lambda: launch_fc1(x=x, probs=None, index=None, pre=pre, activated=activated, wave=wave, shape=shape, tile=tile)
    )
    if other == "grouped_mm":
        weights = pages[:, : 2 * NEURONS * HIDDEN].reshape(EXPERTS, 2 * NEURONS, HIDDEN).transpose(1, 2)
        offsets = torch.arange(tokens, total + 1, tokens, dtype=torch.int32, device=device)
        return seconds_of(lambda: F.grouped_mm(x, weights, offs=offsets)) / paged
    flops = 2 * total * HIDDEN * 2 * NEURONS
    moved = 2 * (x.numel() + EXPERTS * 2 * NEURONS * HIDDEN + pre.numel() + activated.numel())
    return max(flops / _matmul_flops_per_second(), moved / _copy_bytes_per_second()) / paged


@dataclass
class _Pages:
    """Host slots of an arena as a run has it, device slots, and the copies between them."""

    host: Arena
    copier: StreamCopier
    pairs: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, count: int) -> _Pages:
        """``count`` pages of ``PAGE_BYTES``."""
        slot_class, device = SlotClass(torch.float32, PAGE_BYTES // 4), _device()
        largest = largest_segment(device)
        host = Arena(device=torch.device("cpu"), kind=TierKind.HOST, pin=cuda_runtime(), largest=largest)
        there = Arena(device=device, largest=largest)
        for arena in (host, there):
            arena.set_limit(slot_class, 8 * count)  # pages of a model of which these are a part
        pairs = []
        for _ in range(count):
            source, target = (arena.tensor(slot_class, arena.allocate(slot_class)) for arena in (host, there))
            pairs.append((source.fill_(1.0), target))
        return cls(host, StreamCopier(CudaStreams(device)), pairs)

    def bring(self) -> None:
        """All pages come, beside what compute is given meanwhile."""
        self.copier.released(target for _, target in self.pairs)
        self.copier.load(self.pairs)

    def wait(self) -> None:
        """Compute goes on when they are there."""
        self.copier.acquired(target for _, target in self.pairs)


def page_in_ratio() -> float:
    """K6: bandwidth of pages that come as the mover's jobs copy them, against one plain pinned copy."""
    plain = torch.empty(32 * PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(plain, device=_device())
    best = seconds_of(lambda: target.copy_(plain, non_blocking=True))
    pages = _Pages.of(32)

    def come() -> None:
        pages.bring()
        pages.wait()

    return best / seconds_of(come)


def overlap_share() -> float:
    """K7: of the shorter of products and page-in, how much disappears when both run at once."""
    pages = _Pages.of(32)
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=_device())
    out = torch.empty_like(a)

    def copies() -> None:
        pages.bring()
        pages.wait()

    copying = seconds_of(copies)
    rounds = max(1, round(copying / seconds_of(lambda: torch.mm(a, a, out=out))))

    def products() -> None:
        for _ in range(rounds):
            torch.mm(a, a, out=out)

    def both() -> None:
        pages.bring()
        products()
        pages.wait()

    alone = seconds_of(products)
    return (alone + copying - seconds_of(both)) / min(alone, copying)


def adam_ratio() -> float:
    """K8: bytes that a fused step moves a second (p, m, v read and written, g read, weight written), against a copy."""
    numel, device = 64 * MIB, _device()
    p, m, v, g = (torch.rand(numel, device=device) for _ in range(4))
    weight = torch.empty(numel, dtype=torch.bfloat16, device=device)
    record = StepRecord(step=5, lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)
    segment = AdamSegment(p=p, m=m, v=v, g=g, weight=weight, records=[record])
    seconds = seconds_of(lambda: launch_adam([segment], decoupled=True))
    return (4 * 7 + 2) * numel / seconds / _copy_bytes_per_second()

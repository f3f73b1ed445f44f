"""Measures the machine at hand with a small part of the model that is planned.

[Note: probe]
Peak rates say little about a step of small products, least of all on a CPU. So steps are made of a few of the model's
own layers at its own sizes [Note: miniature], and timed in parts: experts; what is around them in a layer; embedding,
output layer and loss; the optimizer. Rates are the counted work over the time, so that the plan's sums give the times
back: of a layer's parts as often as the model has layers, of experts as often as it has rows. What paging reaches of a
disk's rates is measured as well, on an optimizer step with a quarter of a layer's pages in memory. It takes a few
seconds and some memory. Where pages will leave, freed memory goes back to the system while steps are made, as it will
in the run [Note: heap]. Routers as they are drawn at the beginning tell besides which experts have tokens at all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megascale_omni.paging.budget import Budget
from megascale_omni.paging.heap import give_large_blocks_back
from megascale_omni.paging.layout import MIB
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.planner.bandwidth import Disk
from megascale_omni.planner.devices import Device
from megascale_omni.planner.miniature import Miniature, StepTimes
from megascale_omni.planner.models import ModelCard
from megascale_omni.planner.reach import in_reach

WARMUP, REPEATS = 2, 5

TEXTS, ROUTERS = 6, 6
"""What is drawn to see which experts get tokens."""


@dataclass(frozen=True)
class Measured:
    """What :func:`measure_here` found. ``routed``: experts that got tokens, for each forward and layer; None where
    that could not be tried.
    """

    device: Device
    routed: tuple[tuple[tuple[int, ...], ...], ...] | None

    def active_share(self, num_experts: int) -> float | None:
        """Share of experts that get tokens in a forward."""
        if self.routed is None:
            return None
        counts = [len(experts) for layers in self.routed for experts in layers]
        return sum(counts) / (len(counts) * num_experts)


def measure_here(card: ModelCard, *, page_bytes: int, gives_back: bool = False) -> Measured:
    """The device that the process computes on, measured at the sizes of ``card``, see [Note: probe].

    ``gives_back``: large freed blocks go back to the system, from now on in the whole process.
    """
    device = _device()
    if gives_back and device.type == "cpu":
        give_large_blocks_back()
    made = in_reach(card, device)
    found, model, routed = _tried(made, device, page_bytes=page_bytes)
    with_rows = [t for t in found if t.row_share > 0]
    if not with_rows:  # few tokens and many experts, of which some are made: none that tokens have found
        made = replace(made, num_experts=max(made.moe_router_topk, model.number))
        found, model, routed = _tried(made, device, page_bytes=page_bytes)
        with_rows = [t for t in found if t.row_share > 0]
    tokens = made.micro_batch_size * made.seq_length
    experts, head = _median([t.experts / t.row_share for t in with_rows]), _median([t.head for t in found])
    around = _median([t.passes - t.experts - t.head for t in found])
    heads = card.vocabulary / made.vocabulary
    dense = card.num_layers * around / model.num_layers + heads * head
    elements = card.num_layers * model.layer_elements + heads * model.head_elements
    passes = 8 if card.recompute else 6
    dense_rate = passes * tokens * elements / dense
    rows = model.num_layers * tokens * card.moe_router_topk
    expert_rate = passes * rows * card.expert.num_parameters / experts
    copied = torch.empty(64 * MIB, dtype=torch.uint8)
    link = copied.numel() / _seconds(lambda: copied.to(device, copy=True), device)
    measured = Device(
        name="this machine",
        bf16_flops=dense_rate,
        fp32_flops=dense_rate,
        memory_bytes=memory_here(),
        link_bytes=link,
        memory_bytes_s=_bytes_of_a_step(card) * model.stepped_elements / _median([t.optimizer for t in found]),
        efficiency=1.0,
        experts=expert_rate / dense_rate,
    )
    whole = made.num_experts == card.num_experts
    return Measured(measured, routed if whole else None)


def _tried(
    card: ModelCard, device: torch.device, *, page_bytes: int
) -> tuple[list[StepTimes], Miniature, tuple[tuple[tuple[int, ...], ...], ...]]:
    """Times of some steps of a miniature, which has given its pages back, and what its routers choose."""
    model = Miniature(card, device, page_bytes=page_bytes)
    try:
        found = _steps(model, WARMUP + REPEATS)[WARMUP:]
        return found, model, tuple(layers for _ in range(TEXTS) for layers in model.routed(ROUTERS))
    finally:
        model.close()


def _steps(model: Miniature, count: int) -> list[StepTimes]:
    times = []
    for number in range(1, count + 1):
        model.manager.schedule.begin_step(number)
        model.passes()
        model.step()
        times.append(model.times)
    return times


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _bytes_of_a_step(card: ModelCard) -> int:
    """Read and written an element, as a plan counts them."""
    return 30 if card.bf16 else 28


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def memory_here() -> int:
    """Bytes of memory of the device that the process computes on."""
    device = _device()
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _once(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one call: the median of some, after two that warm up."""
    found = sorted([_once(work, device) for _ in range(REPEATS + 2)][2:])
    return found[len(found) // 2]


def paging_efficiency(card: ModelCard, disk: Disk, *, here: Device, page_bytes: int, folder: str | Path) -> float:
    """What an optimizer step whose pages come from disk and go back reaches of the disk's rates; at most 1.

    ``here`` is what :func:`measure_here` gave. Measured with a quarter of a layer's pages in memory, or as many as are
    needed. Where that is all, or where computing takes longer than moving, it tells nothing, and is 1.
    """
    device = torch.device("cpu")
    card = in_reach(card, device)
    budget = Budget(fraction=0.25)
    while True:
        options = PagingOptions(device_budget=budget, disk_path=folder)
        layer = Miniature(card, device, page_bytes=page_bytes, options=options, layers=1)
        try:
            layer.manager.check_budget()
            break
        except ValueError:  # a few large pages: as many as work
            layer.close()
            if budget.fraction == 1.0:
                return 1.0
            budget = Budget(fraction=min(1.0, 2 * (budget.fraction or 1.0)))
    shares = []
    try:
        for number in range(1, REPEATS + 1):
            layer.manager.schedule.begin_step(number)
            layer.passes()
            before = layer.manager.stats()
            layer.step()
            seconds, after = layer.times.optimizer, layer.manager.stats()
            computing = _bytes_of_a_step(card) * layer.stepped_elements / here.memory_bytes_s
            moved = [after.get(name, 0) - before.get(name, 0) for name in ("bytes_loaded", "bytes_written")]
            moving = disk.seconds(*moved)
            shares.append(moving / seconds if moving > computing else 1.0)
    finally:
        layer.close()
    return min(1.0, sorted(shares[2:])[len(shares[2:]) // 2])

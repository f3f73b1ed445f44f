"""Measures the machine at hand with pieces of the model that is planned.

[Note: probe]
Peak rates say little about a step of small products, least of all on a CPU. So each kind of work that a step is made of
is done once at the model's own sizes: one layer of experts, forward and backward, with even counts of tokens; what is
around them in a layer (norms, attention, router, the way to the experts and back); and Adam on pages. Rates are the
counted work over the time, so that the plan's sums give the times back. What paging reaches of a disk's rates is
measured as well, on an optimizer step with a quarter of the layer's pages in memory. It takes a few seconds and some
memory: of very many or large experts only as many as fit in ``EXPERT_BYTES`` are made, with as many tokens each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megascale_omni.experts.activation import Activation
from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.products import products_for
from megascale_omni.experts.shards import PageShards
from megascale_omni.experts.workspace import Workspace
from megascale_omni.optimizer.arithmetic import arithmetic_for
from megascale_omni.optimizer.paged_adam import GroupBinding, PagedAdam
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.layout import MIB, PageLayout
from megascale_omni.paging.manager import ExpertManager, PagingOptions
from megascale_omni.paging.planes import Plane
from megascale_omni.planner.bandwidth import Disk
from megascale_omni.planner.devices import Device
from megascale_omni.planner.models import ModelCard

EXPERT_BYTES = 128 * MIB
"""Weights of the experts that are made at most; their other planes come on top."""

REPEATS = 4


def measure_here(card: ModelCard, *, page_bytes: int) -> Device:
    """The device that the process computes on, measured at the sizes of ``card``, see [Note: probe]."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if card.bf16 else torch.float32
    tokens = card.micro_batch_size * card.seq_length
    experts, step, elements = _experts_seconds(card, device, page_bytes=page_bytes)
    dense = _dense_seconds(card, device, dtype, tokens=tokens)
    passes = 8 if card.recompute else 6
    dense_rate = passes * tokens * _dense_elements(card) / dense
    expert_rate = passes * tokens * card.moe_router_topk * card.expert.num_parameters / experts
    copied = torch.empty(64 * MIB, dtype=torch.uint8)
    link = copied.numel() / _seconds(lambda: copied.to(device, copy=True), device)
    return Device(
        name="this machine",
        bf16_flops=dense_rate,
        fp32_flops=dense_rate,
        memory_bytes=_memory_bytes(device),
        link_bytes=link,
        memory_bytes_s=_bytes_of_a_step(card) * elements / step,
        efficiency=1.0,
        experts=expert_rate / dense_rate,
    )


def _bytes_of_a_step(card: ModelCard) -> int:
    """Read and written an element, as a plan counts them."""
    return 30 if card.bf16 else 28


def _memory_bytes(device: torch.device) -> int:
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


# -- experts -----------------------------------------------------------------------------------------------------------


class _Layer:
    """One layer of a model's experts with its optimizer; of very many or large experts as many as fit."""

    def __init__(
        self, card: ModelCard, device: torch.device, *, page_bytes: int, options: PagingOptions | None = None
    ) -> None:
        dtype = torch.bfloat16 if card.bf16 else torch.float32
        self.card = card
        self.number = min(card.num_experts, max(1, EXPERT_BYTES // (card.expert.num_parameters * dtype.itemsize)))
        self.manager = ExpertManager(device=device, options=options)
        workspace = Workspace(device)
        dtypes = {Plane.WEIGHT: dtype, Plane.GRADIENT: torch.float32}
        if dtype is not torch.float32:
            dtypes[Plane.MASTER] = torch.float32
        self.module = PagedExperts(
            manager=self.manager,
            path="probe",
            layout=PageLayout.for_page_bytes(card.expert, page_bytes=page_bytes, dtype=dtype),
            num_experts=self.number,
            dtypes={**dtypes, Plane.MOMENT1: torch.float32, Plane.MOMENT2: torch.float32},
            activation=Activation("silu" if card.gated else "gelu", gated=card.gated),
            style="sequential",
            products=products_for(device=device, choice="auto", workspace=workspace),
            workspace=workspace,
        )
        for expert in range(self.number):
            tensors = {part.tensor.name: torch.zeros(part.tensor.shape) for part in self.module.names.of_expert(expert)}
            self.module.initialise(expert, {name: value.to(device, dtype) for name, value in tensors.items()})
        rows = card.micro_batch_size * card.seq_length * card.moe_router_topk * self.number // card.num_experts
        self.counts = [rows // self.number + (expert < rows % self.number) for expert in range(self.number)]
        self._x_Nh = torch.randn(rows, card.hidden_size, device=device, dtype=dtype, requires_grad=True)
        self._probs_N = torch.ones(rows, device=device, dtype=dtype)
        self._gradient_Nh = torch.randn_like(self._x_Nh)
        self.gradients = ExpertGradients([self.module])
        groups = [{"lr": 1e-4, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8} for _ in range(2)]
        self._adam = PagedAdam(
            [(self.module, GroupBinding(weights=0, biases=1 if card.expert_bias else None))],
            groups=groups,
            arithmetic=arithmetic_for(decoupled=True, fused=False),
            shards=PageShards(),
        )

    def there_and_back(self) -> None:
        """Forward and backward of a micro-batch."""
        if self.card.recompute:
            with torch.no_grad():
                self.module(self._x_Nh, self.counts, self._probs_N)
        self.module(self._x_Nh, self.counts, self._probs_N).backward(self._gradient_Nh)

    def step(self) -> None:
        """The optimizer's part of a step."""
        self.gradients.finish(scale=1.0)
        self.gradients.squares(PageShards())
        self._adam.step()


def _experts_seconds(card: ModelCard, device: torch.device, *, page_bytes: int) -> tuple[float, float, int]:
    """Seconds of a layer's experts in a micro-batch, seconds of an optimizer step, and the elements that it stepped."""
    layer = _Layer(card, device, page_bytes=page_bytes)
    passes = _seconds(layer.there_and_back, device)
    stepping = []
    for _ in range(REPEATS):
        layer.gradients.drop()
        layer.there_and_back()
        stepping.append(_once(layer.step, device))
    active = sum(count > 0 for count in layer.counts)
    layer.manager.close()
    steps = sorted(stepping[2:])
    return passes * card.num_experts / layer.number, steps[len(steps) // 2], active * card.expert.num_parameters


def paging_efficiency(card: ModelCard, disk: Disk, *, here: Device, page_bytes: int, folder: str | Path) -> float:
    """What an optimizer step whose pages come from disk and go back reaches of the disk's rates; at most 1.

    ``here`` is what :func:`measure_here` gave. Measured with a quarter of a layer's pages in memory, or as many as are
    needed. Where that is all, or where computing takes longer than moving, it tells nothing, and is 1.
    """
    device = torch.device("cpu")
    budget = Budget(fraction=0.25)
    while True:
        options = PagingOptions(device_budget=budget, disk_path=folder)
        layer = _Layer(card, device, page_bytes=page_bytes, options=options)
        try:
            layer.manager.check_budget()
            break
        except ValueError:  # a few large pages: as many as work
            layer.manager.close()
            if budget.fraction == 1.0:
                return 1.0
            budget = Budget(fraction=min(1.0, 2 * (budget.fraction or 1.0)))
    active = sum(count > 0 for count in layer.counts)
    computing = _bytes_of_a_step(card) * active * card.expert.num_parameters / here.memory_bytes_s
    shares = []
    try:
        for number in range(1, REPEATS + 1):
            layer.manager.schedule.begin_step(number)
            layer.gradients.drop()
            layer.there_and_back()
            before, start = layer.manager.stats(), time.perf_counter()
            layer.step()
            seconds, after = time.perf_counter() - start, layer.manager.stats()
            moved = [after.get(name, 0) - before.get(name, 0) for name in ("bytes_loaded", "bytes_written")]
            moving = disk.seconds(*moved)
            shares.append(moving / seconds if moving > computing else 1.0)
    finally:
        layer.manager.close()
    return min(1.0, sorted(shares[2:])[len(shares[2:]) // 2])


# -- the rest of a layer -----------------------------------------------------------------------------------------------


def _dense_elements(card: ModelCard) -> int:
    """What a plan counts for the dense part of the probe: its parameters, and attention's scores."""
    h = card.hidden_size
    return 4 * h * h + card.num_experts * h + card.seq_length * h


def _dense_seconds(card: ModelCard, device: torch.device, dtype: torch.dtype, *, tokens: int) -> float:
    """Seconds of what is around the experts in a layer, forward and backward: unfused, as stock computes it."""
    h, heads = card.hidden_size, max(1, card.hidden_size // 64)
    sequences, length = card.micro_batch_size, card.seq_length
    weights = [torch.randn(n, h, device=device, dtype=dtype).mul_(h**-0.5) for n in (3 * h, h, card.num_experts)]
    for weight in weights:
        weight.requires_grad_()
    x_Th = torch.randn(tokens, h, device=device, dtype=dtype, requires_grad=True)
    mask = torch.ones(length, length, device=device, dtype=torch.bool).triu(1)
    topk = min(card.moe_router_topk, card.num_experts)

    def layer() -> None:
        for _ in range(2 if card.recompute else 1):
            y_Th = torch.nn.functional.rms_norm(x_Th, (h,))
            q, k, v = (y_Th @ weights[0].t()).view(sequences, length, heads, 3, h // heads).permute(3, 0, 2, 1, 4)
            scores = (q @ k.transpose(-1, -2)).float().masked_fill(mask, -1e4).softmax(-1).to(dtype)
            y_Th = x_Th + (scores @ v).transpose(1, 2).reshape(tokens, h) @ weights[1].t()
            z_Th = torch.nn.functional.rms_norm(y_Th, (h,))
            chosen = (z_Th @ weights[2].t()).float().softmax(-1).topk(topk)
            order = chosen.indices.reshape(-1).argsort(stable=True)
            sent_Nh = z_Th[order // topk]
            back_Nh = torch.zeros_like(y_Th).index_add(0, order // topk, sent_Nh)
            out = y_Th + back_Nh * chosen.values.sum(-1, keepdim=True).to(dtype)
        out.sum().backward()

    return _seconds(layer, device)

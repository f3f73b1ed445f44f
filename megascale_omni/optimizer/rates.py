"""Where a run's pages are stepped, settled at its start by what its arithmetic allows and the machine's rates say."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from megascale_omni.config import OptimizerDevice
from megascale_omni.experts.module import PagedExperts
from megascale_omni.optimizer.arithmetic import AdamArithmetic
from megascale_omni.optimizer.cuda_arithmetic import CudaAdam, CudaAdamW, fuses_multiply_add
from megascale_omni.optimizer.history import StepRecord
from megascale_omni.optimizer.places import Rates, Settled, StepBytes, settle
from megascale_omni.paging.planes import Plane

logger = logging.getLogger(__name__)

MEASURED = 1 << 22
"""Parameters of the step that is measured: more than a cache holds, and some milliseconds."""
REPEATS = 5
_RECORD = StepRecord(step=2, lr=1e-4, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)


def unlike_on_host(arithmetic: AdamArithmetic, device: torch.device) -> str | None:
    """Why a page of ``device`` would have other bits if it were stepped in host memory; None where it would not."""
    if device.type == "cpu":
        return None
    if not isinstance(arithmetic, CudaAdam | CudaAdamW):
        return f"the kernels of {arithmetic.name} round otherwise on {device.type} than in host memory"
    if not fuses_multiply_add():
        return "this processor has no fused multiply-add in torch's kernels, which the device has"
    return None


def measured_rates(arithmetic: AdamArithmetic, device: torch.device, numbers: StepBytes) -> Rates:
    """The rates of this machine's accelerator. Takes some hundredths of a second."""
    host = [torch.rand(MEASURED, pin_memory=True) for _ in range(4)]
    there = [tensor.to(device) for tensor in host]
    nbytes = host[0].numel() * host[0].element_size()

    def step(tensors: Sequence[torch.Tensor]) -> None:
        p, m, v, g = tensors
        arithmetic.step(p=p, m=m, v=v, g=g, record=_RECORD)

    touched = MEASURED * numbers.touched
    return Rates(
        to_device=nbytes / _seconds(lambda: there[0].copy_(host[0], non_blocking=True), device),
        to_host=nbytes / _seconds(lambda: host[0].copy_(there[0], non_blocking=True), device),
        host_step=touched / _seconds(lambda: step(host), device),
        device_step=touched / _seconds(lambda: step(there), device),
    )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    found = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def settle_for(choice: OptimizerDevice, *, modules: Sequence[PagedExperts], arithmetic: AdamArithmetic) -> Settled:
    """Where pages of ``modules`` that lie in host memory are stepped; says so where there may be any.

    Raises:
        ValueError: a choice that would change bits, or that has no effect.
    """
    if not modules:
        return Settled("device", "no page is stepped")
    manager = modules[0].manager
    device, host_slots = manager.arena.device, manager.pager.can_evict and not manager.options.host_budget.is_nothing
    dtypes = [module.pages.dtypes for module in modules]
    numbers = max(
        (StepBytes.of(weight=found[Plane.WEIGHT], gradient=found[Plane.GRADIENT]) for found in dtypes),
        key=lambda item: item.gradient + item.weight,
    )
    unlike = unlike_on_host(arithmetic, device)
    measures = host_slots and choice == "auto" and unlike is None and device.type != "cpu"
    rates = measured_rates(arithmetic, device, numbers) if measures else None
    settled = settle(choice, unlike=unlike, rates=rates, numbers=numbers, host_slots=host_slots)
    if host_slots:
        where = "where they lie" if settled.in_host else "on the device"
        logger.info("pages whose optimizer state lies in host memory are stepped %s: %s", where, settled.why)
    return settled

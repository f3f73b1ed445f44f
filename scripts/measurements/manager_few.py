"""Few experts hit a step, a budget of a quarter: how near a training comes to what the planner says it can take.

Computing is measured, not guessed: a training of the same task with every page resident, its passes and its optimizer
apart. The disk is measured with requests of a page. From these and from what a step moves at least, the planner's own
functions say how long a step takes (``planner/prediction.py``). The paged training and the resident one take turns.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megascale_omni.paging.budget import Budget
from megascale_omni.paging.layout import MIB
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.planner.bandwidth import measure_disk
from megascale_omni.planner.devices import DEVICES
from megascale_omni.planner.prediction import Machine, Prediction, timed
from megascale_omni.planner.state import RankState
from megascale_omni.planner.steps import Work
from megascale_omni.planner.traffic import step_traffic
from scripts.measurements.paging_model import ALL, Model, Task, Trained
from scripts.measuring.progress import say
from scripts.measuring.statistics import summarize

BUDGET = 0.25
TASK = Task(
    modules=4, experts=64, active=19, tokens=1024, hidden=256, ffn=512, rows=512, bias=False, micro_batches=1,
    evaluate=False, batch_bytes=2 * 2**20, blas=False,
)  # fmt: skip
"""1.5 GiB of state, an expert a page; 19 of 64 experts (29.7 %) have tokens, drawn anew at every step."""

_WARMUP, _STEPS = 4, 7


@dataclass
class _Stopwatch:
    """Seconds spent in the optimizer's part of a step."""

    seconds: float = 0.0
    _inside: bool = field(default=False)

    def watch(self, owner: object, name: str) -> None:
        """From here on time in this method counts."""
        call: Callable[..., Any] = getattr(owner, name)

        def timed_call(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - whatever it takes
            start = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - start

        setattr(owner, name, timed_call)


@dataclass(frozen=True)
class Few:
    """Seconds a step: measured, and as the planner says."""

    measured: float
    planned: Prediction

    @property
    def share(self) -> float:
        """Speed against the planner's bound."""
        return self.planned.step_seconds / self.measured


def measure(active: int, *, task: Task = TASK) -> Few:
    """A training in which ``active`` experts of each module have tokens in a step."""
    task = replace(task, active=active)
    with tempfile.TemporaryDirectory(prefix="megascale-few-") as folder:
        page = task.layout.slot_class(torch.float32).nbytes
        disk = measure_disk(folder, request_bytes=page)
        options = PagingOptions(device_budget=Budget(fraction=BUDGET), disk_path=Path(folder))
        resident, paged = Model(task, ALL, poison=False), Model(task, options, poison=False)
        watch = _Stopwatch()
        for owner, name in (
            (resident.adam, "step"),
            *((resident.gradients, name) for name in ("finish", "squares", "zeros")),
        ):
            watch.watch(owner, name)
        computing, optimizing, paging = [], [], []
        try:
            for number in range(1, _WARMUP + _STEPS + 1):
                watch.seconds = 0.0
                whole = _seconds(lambda n=number: resident.step(n, Trained()))  # type: ignore[misc]
                moving = _seconds(lambda n=number: paged.step(n, Trained()))  # type: ignore[misc]
                if number == _WARMUP:
                    before = paged.manager.stats()
                if number > _WARMUP:
                    computing.append(whole - watch.seconds)
                    optimizing.append(watch.seconds)
                    paging.append(moving)
            after = paged.manager.stats()
        finally:
            paged.manager.close()
        state = RankState(paged.manager.modules)
    budget = int(BUDGET * state.total_bytes)
    machine = Machine(replace(DEVICES["a100"], link_bytes=1e12), budget, 0, disk)  # its memory is the device's
    work = Work(task.micro_batches, active / task.experts, gradient_sweep=False)
    planned = timed(
        step_traffic(state, work, budget_bytes=budget, least=True),
        machine,
        tiers={"device": budget, "host": 0, "disk": state.total_bytes - budget},
        passes=summarize(computing).median,
        optimizer=summarize(optimizing).median,
        together=False,
    )
    found = Few(summarize(paging).median, planned)
    loaded, written = ((after[name] - before[name]) / _STEPS for name in ("bytes_loaded", "bytes_written"))
    late = (after["page_faults"] - before["page_faults"]) / _STEPS
    say(
        f"    {active} of {task.experts} hit: {found.measured:.2f} s measured; planned passes "
        f"{planned.passes.compute_seconds:.2f} s beside io {planned.passes.io_seconds:.2f} s, optimizer "
        f"{planned.optimizer.compute_seconds:.2f} s beside io {planned.optimizer.io_seconds:.2f} s: {found.share:.2f}"
    )
    say(
        f"    moved a step: {loaded / MIB:.0f} MiB in ({late:.0f} pages late), {written / MIB:.0f} MiB out: "
        f"the disk needs {disk.seconds(loaded, written):.2f} s; who knows every draw beforehand moves "
        f"{planned.loaded_bytes / MIB:.0f} and {planned.written_bytes / MIB:.0f} MiB"
    )
    return found


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start

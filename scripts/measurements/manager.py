"""Expert memory run like an operating system's: page-ins against MIN and LRU, what deciding costs, how near to the
planner's word trainings come, an arena that shrinks, random work.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from megascale_omni.config import HeatConfig, ObserveConfig
from megascale_omni.heat.observation import Observation
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.paging.minimum import Moved
from megascale_omni.paging.replay import PolicyName, replay
from megascale_omni.paging.trace import Trace, read_trace
from scripts.measurements.manager_few import TASK as FEW
from scripts.measurements.manager_few import measure as measure_few
from scripts.measurements.manager_plans import CONFIGURATIONS, Beside, compare
from scripts.measurements.paging_model import ALL, Model, Task, Trained, batches_of
from scripts.measurements.rows import Context, Row
from scripts.measuring.processes import ROOT
from scripts.measuring.progress import say

PERCENTS = (10, 25, 50)
_SMALL_BATCHES = "--micro-batch-size 1 --seq-length 64 --global-batch-size 8"
SCENARIOS: dict[str, str | None] = {
    # name: flags beside the quickstart's; None: drawn from a drifting Zipf distribution
    "own": "--train-iters 12",
    "small": f"--train-iters 8 {_SMALL_BATCHES}",
    "top1": f"--train-iters 8 {_SMALL_BATCHES} --moe-router-topk 1 --moe-router-pre-softmax",
    "zipf": None,
    "evaluation": "--train-iters 8 --eval-interval 2 --eval-iters 6",
}
_TIMEOUT_SECONDS = 900.0
_OPERATIONS = 10_000


class ZipfModel(Model):
    """The small model with tokens that choose experts by a Zipf distribution whose order drifts."""

    drift = 0

    def forward(self, generator: torch.Generator) -> torch.Tensor:
        """The loss of a batch."""
        task = self.task
        self.drift += 1
        x = torch.randn(task.tokens, task.hidden, generator=generator)
        for number, experts in enumerate(self.modules):
            ranks = (torch.arange(task.experts) * (2 * number + 1) + self.drift // 6) % task.experts
            weights = 1.0 / (1.0 + ranks.float()) ** 1.1
            counts = torch.bincount(
                torch.multinomial(weights, task.tokens, replacement=True, generator=generator), minlength=task.experts
            )
            x = x + experts(x, counts.tolist(), torch.rand(task.tokens, generator=generator))
        return x.square().mean()


def _zipf_trace(path: Path) -> None:
    task = Task(steps=12, modules=4, experts=64, tokens=64, micro_batches=4, hidden=32, ffn=32, rows=32, bias=False)
    with batches_of(task):
        model = ZipfModel(task, ALL)
        observe = ObserveConfig(trace=str(path))
        observation = Observation(model.manager, heat=HeatConfig(enabled=False), observe=observe)
        for number in range(1, task.steps + 1):
            model.step(number, Trained())
        observation.close()


def _trace(context: Context, scenario: str) -> Trace:
    def record() -> Trace:
        with tempfile.TemporaryDirectory(prefix="megascale-trace-") as folder:
            path = Path(folder) / "run.trace"
            flags = SCENARIOS[scenario]
            if flags is None:
                _zipf_trace(path)
                return read_trace(path)
            command = [sys.executable, "scripts/pretrain_moe.py", "--yaml-cfg", "configs/quickstart.yaml"]
            command += ["--data-path", str(context.data_path), "--megascale", "--megascale-page-size", "1MiB"]
            command += ["--megascale-trace", str(path), "--no-progress", *flags.split()]
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
            )
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
            return read_trace(path)

    return context.once(("trace", scenario), record)


def _moved(context: Context, scenario: str, percent: int, policy: PolicyName) -> Moved:
    """What a policy moves: ours as a run does it, several pages at once; the yardsticks page by page."""
    trace = _trace(context, scenario)
    return context.once(
        ("moved", scenario, percent, policy),
        lambda: replay(trace, policy=policy, budget=Budget(fraction=percent / 100), together=policy == "ours"),
    )


def _page_ins(context: Context, *, scenario: str, percent: int, against: PolicyName) -> float:
    ours, other = (_moved(context, scenario, percent, policy) for policy in ("ours", against))
    return ours.bytes_in / max(1, other.bytes_in)


def _replay_rows() -> list[Row]:
    rows = []
    for row_id, against, bound, aim in (("M1", "min", 1.25, 1.05), ("M2", "lru", 1.0, 0.99)):
        for scenario in SCENARIOS:
            for percent in PERCENTS:
                measure = partial(_page_ins, scenario=scenario, percent=percent, against=against)  # type: ignore[arg-type]
                rows.append(
                    Row(
                        id=f"{row_id}-{scenario}-{percent}",
                        what=f"bytes of page-ins, {scenario}, budget {percent} %: ours / {against}",
                        unit="x",
                        kind="at_most",
                        bound=bound,
                        aim=aim,
                        measure=measure,
                    )
                )
    return rows


@dataclass(frozen=True)
class Shrunk:
    """What halving an arena gave: share of the half that the process lost, seconds for 1,000 pages, equal losses."""

    share: float
    seconds: float
    equal: bool


def _shrink(context: Context) -> Shrunk:
    return context.once("shrink", _measure_shrink)


def _measure_shrink() -> Shrunk:
    task = Task(
        steps=4, modules=2, experts=64, active=64, tokens=128, hidden=256, ffn=256, rows=64, bias=False,
        evaluate=False, micro_batches=1, batch_bytes=1 << 20,
    )  # fmt: skip
    expected, found = Trained(), Trained()
    with tempfile.TemporaryDirectory(dir=ROOT) as folder, batches_of(task):
        resident = Model(task, ALL)
        for number in range(1, task.steps + 1):
            resident.step(number, expected)
        del resident
        model = Model(task, PagingOptions(device_budget=Budget(fraction=1.0), disk_path=folder))
        manager, process = model.manager, psutil.Process()
        for number in (1, 2):
            model.step(number, found)
        used, before = manager.arena.bytes_used, process.memory_info().rss
        evicted = manager.stats().get("pages_evicted", 0)
        start = time.perf_counter()
        manager.resize(Budget(nbytes=used // 2))
        seconds = time.perf_counter() - start
        lost = before - process.memory_info().rss
        pages = manager.stats()["pages_evicted"] - evicted
        for number in (3, 4):
            model.step(number, found)
        manager.check_integrity()
        manager.close()
    say(f"    {pages} pages left in {seconds:.2f} s; {lost / 2**20:.1f} of {used / 2**21:.1f} MiB returned")
    return Shrunk(lost / (used / 2), seconds * 1000 / max(1, pages), expected.losses == found.losses)


def _random_operations(context: Context) -> float:
    """Rules of the pager's state machine that were made, each with its model and ``check_integrity`` after it."""
    import hypothesis
    from hypothesis.stateful import run_state_machine_as_test

    from tests.unit.paging.test_pager_machine import ChosenOrder

    done = 0

    class Counted(ChosenOrder):
        def check_invariants(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - hypothesis' own
            nonlocal done
            super().check_invariants(*arguments, **options)
            done += 1

    settings = hypothesis.settings(
        max_examples=20, stateful_step_count=60, deadline=None, database=None, derandomize=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    while done < _OPERATIONS:
        run_state_machine_as_test(Counted, settings=settings)
    return float(done)


# -- costs, and the planner's word -------------------------------------------------------------------------------------

COSTS = (("quickstart", 25), ("fine", 50))
"""Configurations whose decisions are timed: few large experts, and many small ones."""


def _cost(context: Context, *, preset: str, percent: int) -> float:
    return compare(context, preset, percent).cost.share


def _off(context: Context, *, preset: str, percent: int, what: str) -> float:
    beside: Beside = compare(context, preset, percent)
    return float(getattr(beside, what))


def _plan_rows() -> list[Row]:
    kinds = (
        ("bytes", "bytes_off", "planned bytes by tier and plane, the worst one, off by (of all pages)", 0.02, 0.0),
        ("moved", "moved_off", "planned bytes that a step moves, off by", 0.02, 0.0),
        ("time", "time_off", "planned seconds of a step, off by", 0.25, 0.10),
    )
    return [
        Row(
            id=f"M6-{kind}-{preset}-{percent}",
            what=f"{preset}, budget {percent} %: {what}",
            unit="x",
            kind="at_most",
            bound=bound,
            aim=aim,
            measure=partial(_off, preset=preset, percent=percent, what=name),
        )
        for preset, percent in CONFIGURATIONS
        for kind, name, what, bound, aim in kinds
    ]


ROWS: tuple[Row, ...] = (
    *_replay_rows(),
    *(
        Row(
            id=f"M3-{preset}",
            what=f"{preset}, budget {percent} %: of a step in heat map and policies, by the clock",
            unit="of a step",
            kind="at_most",
            bound=0.01,
            aim=0.003,
            measure=partial(_cost, preset=preset, percent=percent),
        )
        for preset, percent in COSTS
    ),
    Row(
        id="M4",
        what=f"{FEW.active} of {FEW.experts} experts hit a step, budget 25 %: speed against the planner's bound",
        unit="of the bound",
        kind="at_least",
        bound=0.9,
        aim=0.97,
        measure=lambda context: measure_few(FEW.active).share,
    ),
    Row(
        id="M4-full",
        what="all experts hit a step, the same (reported: no bound is set)",
        unit="of the bound",
        kind="at_least",
        bound=0.0,
        measure=lambda context: measure_few(FEW.experts).share,
    ),
    *_plan_rows(),
    Row(
        id="M5-memory",
        what="an arena shrunk by half: what the process gives back / that half",
        unit="x",
        kind="at_least",
        bound=0.92,
        aim=0.99,
        measure=lambda context: _shrink(context).share,
    ),
    Row(
        id="M5-seconds",
        what="an arena shrunk by half, for 1,000 pages that leave",
        unit="s",
        kind="at_most",
        bound=8.0,
        aim=1.0,
        measure=lambda context: _shrink(context).seconds,
    ),
    Row(
        id="M5-losses",
        what="losses after it have the bits of a run with all pages resident",
        unit="(1: yes)",
        kind="at_least",
        bound=1.0,
        measure=lambda context: float(_shrink(context).equal),
    ),
    Row(
        id="M7",
        what="random operations of the pager against a naive model, invariants checked after each",
        unit="operations",
        kind="at_least",
        bound=_OPERATIONS,
        aim=100_000,
        measure=_random_operations,
    ),
)

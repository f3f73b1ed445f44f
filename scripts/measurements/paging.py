"""Paging: experts whose pages leave memory. The same bits, at what cost in time and bytes."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from megascale_omni.paging.budget import Budget
from megascale_omni.paging.manager import PagingOptions
from scripts.comparison.presets import megascale_flags, preset_flags
from scripts.comparison.result import STOCK, Comparison, paged_name
from scripts.comparison.runner import Plan, compare
from scripts.measurements import paging_overlap
from scripts.measurements.paging_adam import Case
from scripts.measurements.paging_adam import compare as compare_adam
from scripts.measurements.paging_costs import hit_share, replay_share
from scripts.measurements.paging_faults import random_faults
from scripts.measurements.paging_faults import run as run_fault
from scripts.measurements.paging_model import Task, smallest_budget_of, train
from scripts.measurements.paging_runs import LAYOUTS, different_runs, trained_at
from scripts.measurements.rows import Context, Row
from scripts.measuring.progress import say

THREADS = 2
_BUDGET = "25%"
_ADAM_STEPS = 1000
_ADAM = {"AdamW": Case(), "L2": Case(decoupled=False)}
_FAULTS, _FAULT_SEED = 200, 1
_LIMIT_BYTES = 2 * 2**30


# -- P2: deferred Adam -------------------------------------------------------------------------------------------------


def _adam_differences(_: Context, *, case: Case) -> float:
    with tempfile.TemporaryDirectory(prefix="megascale-adam-") as folder:
        found = compare_adam(case, Path(folder), steps=_ADAM_STEPS, seed=1)
    say(f"    largest lag {found.lag}, records kept {found.records}, pages loaded {found.loaded}")
    if not found.lag or not found.loaded:
        raise RuntimeError("no page waited, or none left memory: nothing is proved")
    return len(found.differences)


# -- P3: resident state ------------------------------------------------------------------------------------------------


def _comparison(context: Context) -> Comparison:
    def measure() -> Comparison:
        with tempfile.TemporaryDirectory(prefix="megascale-pages-") as folder:
            plan = Plan(
                preset="coarse",
                flags=preset_flags("coarse", data_path=context.data_path, train_iters=20),
                megascale_flags=megascale_flags("coarse"),
                ranks=1,
                threads=THREADS,
                warmup=3,
                steps=6,
                repeats=3,
                validate=False,
                budgets=(_BUDGET,),
                disk_path=Path(folder),
            )
            return compare(plan)

    return context.once("comparison", measure)


def _counted_share(context: Context) -> float:
    return _comparison(context).total_ratio("expert_state_peak_bytes", paged_name(_BUDGET))


def _process_share(context: Context) -> float:
    """Stock's expert state less what the process became smaller by: what must still be there."""
    comparison = _comparison(context)
    stock, paged = comparison.run(STOCK), comparison.run(paged_name(_BUDGET))
    state = stock.total("expert_state_peak_bytes")
    return (state - (stock.total("peak_rss_bytes") - paged.total("peak_rss_bytes"))) / state


# -- P4: overlap -------------------------------------------------------------------------------------------------------


def _overlap(_: Context, *, kind: str, clipped: bool) -> float:
    """Without clipping pages are stepped in the backward. There io is never twice the computation, Adam's included."""
    task = replace(paging_overlap.TASK, clip=paging_overlap.TASK.clip if clipped else 0.0)
    if kind == "equal":
        return paging_overlap.measure(paging_overlap.equal, task=task).share
    if kind == "late":
        task = replace(task, active=task.experts // 2)
        return paging_overlap.measure(paging_overlap.more_computation, task=task).share
    ways = (paging_overlap.more_computation, paging_overlap.more_io)[: 1 + clipped]
    return min(paging_overlap.measure(wanted, task=task).share for wanted in ways)


def _overlap_rows() -> list[Row]:
    """Rows P4, of runs without clipping and with it."""
    cases = {
        "equal": ("compute and io within 1.3x of each other", 0.65, 0.85),
        "twice": ("one at least twice the other", 0.85, 0.96),
        "late": ("routing known only layer by layer: half of the experts hit, others at every step", 0.80, 0.92),
    }
    return [
        Row(
            f"P4-{kind}{suffix}",
            f"max(compute, io) / time at budget 25 %, {what}; {how}",
            "of the bound",
            "at_least",
            least,
            partial(_overlap, kind=kind, clipped=clipped),
            aim,
        )
        for clipped, suffix, how in ((False, "", "no clipping"), (True, "-clipped", "clipped by the global norm"))
        for kind, (what, least, aim) in cases.items()
    ]


# -- P6, P7: larger than memory ----------------------------------------------------------------------------------------


def _factor_trained(context: Context) -> float:
    """How many times the memory limit the expert state may be: stock must die and MegaScale train to its losses."""
    limited = trained_at(context, 4, limit_bytes=_LIMIT_BYTES, budget="128MiB")
    stock, ours = limited.runs
    say(f"    stock: {stock.error}; megascale: {ours.describe()}, losses within {limited.loss_difference:.1e}")
    if not stock.out_of_memory or ours.error is not None:
        return 0.0
    return 4.0 if limited.loss_difference <= 1e-5 else 0.0


def _large_expert_differences(_: Context) -> float:
    task = Task(experts=2, active=2, hidden=64, ffn=1024, rows=16, steps=3, micro_batches=2, batch_bytes=1)
    budget, page = smallest_budget_of(task), task.layout.slot_class(task.dtype).nbytes
    if task.layout.num_slices * page < 2 * budget:
        raise RuntimeError("the expert is not larger than the budget")
    with tempfile.TemporaryDirectory(prefix="megascale-large-") as folder:
        paged = train(task, PagingOptions(device_budget=Budget(nbytes=budget), disk_path=folder), check=True)
    return len(paged.differs_from(train(task)))


# -- faults ------------------------------------------------------------------------------------------------------------


def _fault_problems(_: Context) -> float:
    problems = 0
    for fault in random_faults(_FAULTS, seed=_FAULT_SEED):
        with tempfile.TemporaryDirectory(prefix="megascale-faults-") as folder:
            outcome = run_fault(fault, Path(folder))
        if outcome.problem is not None:
            problems += 1
            say(f"    {fault}: {outcome.problem}")
    return problems


ROWS: tuple[Row, ...] = (
    *(
        Row(
            id=f"P1-{layout}",
            what=f"{layout}: of 12 runs (budgets 10 to 100 %; prefetch on, off, io delayed), those not bit-equal",
            unit="runs",
            kind="at_most",
            bound=0,
            measure=partial(different_runs, layout=layout),
        )
        for layout in LAYOUTS
    ),
    *(
        Row(
            id=f"P2-{name}",
            what=f"deferred {name} against dense, experts active at 5 % of {_ADAM_STEPS} steps: tensors not bit-equal",
            unit="tensors",
            kind="at_most",
            bound=0,
            measure=partial(_adam_differences, case=case),
        )
        for name, case in _ADAM.items()
    ),
    Row(
        "P3-counted", f"resident expert state at budget {_BUDGET} / stock's", "x", "at_most", 0.30, _counted_share, 0.26
    ),
    Row("P3-process", "the same by the memory of the processes", "x", "at_most", 0.30, _process_share, 0.26),
    *_overlap_rows(),
    Row(
        "P5",
        "bytes moved when 4 of 16 experts are hit a step / all hit",
        "x",
        "at_most",
        0.30,
        lambda _: hit_share(),
        0.25,
    ),
    Row(
        "P6",
        "expert state / memory limit in which stock dies and MegaScale trains",
        "x",
        "at_least",
        4,
        _factor_trained,
        8,
    ),
    Row(
        "P7",
        "an expert larger than the device budget: tensors not bit-equal",
        "tensors",
        "at_most",
        0,
        _large_expert_differences,
    ),
    Row("P8", "replay of 100 missed steps / io of 100 touches", "x", "at_most", 0.10, lambda _: replay_share(), 0.03),
    Row(
        "P10-faults",
        f"{_FAULTS} injected faults: those that were not named, changed bits, or left a file",
        "faults",
        "at_most",
        0,
        _fault_problems,
    ),
)

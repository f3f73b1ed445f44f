"""Clipping by module: what it costs, where it equals stock, whether all layouts agree, and what it does to a run."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from scripts.cmsa_demo.main import compare as demonstrate
from scripts.cmsa_demo.train import medians
from scripts.comparison.presets import megascale_flags, preset_flags
from scripts.deepspeed_runs.clipping import clipping_case
from scripts.deepspeed_runs.proof import Case
from scripts.measurements.cmsa_layouts import LAYOUTS, START, WORKER, deviation
from scripts.measurements.rows import Context, Row
from scripts.measuring.processes import Workers
from scripts.measuring.progress import say
from scripts.measuring.statistics import paired_ratio

THREADS = 2
_WARMUP, _STEPS, _BLOCKS = 3, 4, 15
_TIMEOUT_SECONDS = 600.0
_SEEDS, _DEMO_STEPS = 5, 400
# Published for another model; here aims.
_PUBLISHED_SPREAD, _PUBLISHED_OSCILLATION = 0.41 / 3.8, 0.33


def _overhead(context: Context) -> float:
    """C1: whole training steps of the fine preset, with and without, in turn; part of a step."""
    flags = preset_flags("fine", data_path=context.data_path, train_iters=1000)
    own = ["--megascale", *megascale_flags("fine")]
    arguments = {"flags": [*flags, *own]}
    target = "scripts.measurements.cmsa_layouts:StepTimes"
    with Workers(target, ranks=1, threads=THREADS, name="step times", arguments=arguments) as workers:
        (times,) = workers.call(
            "measure", timeout_seconds=_TIMEOUT_SECONDS, warmup=_WARMUP, steps=_STEPS, blocks=_BLOCKS
        )
    found: dict[str, list[float]] = times  # type: ignore[assignment]
    ratio = paired_ratio(found["cmsa"], found["stock"])
    say(f"    {ratio.median:.4f} ({ratio.low:.4f} to {ratio.high:.4f})")
    return 100 * (ratio.median - 1)


def _numbers(context: Context, layout: str, extra: tuple[str, ...] = ()) -> Any:  # noqa: ANN401 - what a worker says
    ranks, flags = LAYOUTS[layout]
    arguments = {"data_path": str(context.data_path), "options": [*flags, *extra]}
    with Workers(WORKER, ranks=ranks, threads=1, name=layout, arguments=arguments) as workers:
        return workers.call("steps", timeout_seconds=_TIMEOUT_SECONDS)[0]


def _bits(context: Context) -> float:
    """C2: steps whose loss or norm is not, to the bit, that of stock's clipping."""
    with tempfile.TemporaryDirectory(prefix="megascale-cmsa-") as folder:
        one = Path(folder) / "one.json"
        one.write_text('{"clip": {"mode": "cmsa", "alpha": 0, "mpus": {"*": "all"}}}')
        found = _numbers(context, "single", ("--megascale-config", str(one)))
    stock = _numbers(context, "single", ("--megascale-clip", "stock"))
    differing = sum(a["loss"] != b["loss"] or a["norm"] != b["norm"] for a, b in zip(found, stock, strict=True))
    unclipped = sum(step["norm"] <= 0.1 for step in stock)
    if unclipped:
        raise RuntimeError(f"{unclipped} of {len(stock)} steps were not clipped: the comparison would prove nothing")
    return float(differing)


def _agreement(context: Context, *, layout: str) -> float:
    """C3: largest relative difference of any module's norm, GVC, threshold or ratio from one process's."""

    def start() -> Path:
        folder = context.data_path.parent / "cmsa-start"  # goes with the corpus
        _numbers(context, "single", (*START, "--save", str(folder)))
        return folder

    path = context.once(("cmsa", "start"), start)
    load = (*START, "--load", str(path), "--no-load-optim", "--no-load-rng", "--finetune")
    expected = context.once(("cmsa", "single"), lambda: _numbers(context, "single", load))
    return deviation(_numbers(context, layout, load), expected)


def _zero_cases() -> dict[str, Case]:
    """By row: cases of two ranks."""
    plain = Case(steps=3, clipping=0.02)
    cases = {f"zero{stage}": replace(plain, stage=stage) for stage in range(4)}
    cpu = {"device": "cpu"}
    for stage in (2, 3):
        extra: dict[str, object] = {"zero_optimization": {"stage": stage, "offload_optimizer": cpu}}
        cases[f"zero{stage}-offload"] = replace(plain, stage=stage, extra=extra)
    cases["zero2-ep2"] = replace(plain, stage=2, section={"expert_parallel_size": 2})
    return {name: clipping_case(case) for name, case in cases.items()}


def _zero_agreement(context: Context, *, layout: str) -> float:
    """C3 under DeepSpeed: against plain PyTorch in one process that has the tokens of both ranks."""

    def measure() -> dict[str, float]:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        target = "scripts.deepspeed_runs.benches:Bench"
        with Workers(target, ranks=2, threads=1, name="clipping under ZeRO", arguments={}) as workers:
            return {
                name: max(workers.call("clip_apart", case=case, timeout_seconds=_TIMEOUT_SECONDS))
                for name, case in _zero_cases().items()
            }

    return context.once(("cmsa", "zero"), measure)[layout]


def _demonstration(context: Context, *, key: str, method: str) -> float:
    """C4: of CMSA over that of global clipping."""
    runs = context.once(("cmsa", "demonstration"), lambda: demonstrate(seeds=_SEEDS, steps=_DEMO_STEPS))
    return medians(runs, method)[key] / medians(runs, "global")[key]


def _demonstration_rows() -> list[Row]:
    rows = []
    for method, name in (("CMSA, alpha auto", "auto"), ("CMSA, alpha 0.35", "fixed")):
        for key, what, aim in (
            ("spread", "spread of log norms", _PUBLISHED_SPREAD),
            ("oscillation", "loss oscillation", _PUBLISHED_OSCILLATION),
            ("final_loss", "final loss", None),
        ):
            rows.append(
                Row(
                    id=f"C4-{name}-{key.replace('_', '-')}",
                    what=f"demonstration, alpha {name}: {what}, CMSA / global clipping",
                    unit="x",
                    kind="at_most",
                    bound=1.0,
                    aim=aim,
                    measure=partial(_demonstration, key=key, method=method),
                )
            )
    return rows


ROWS: tuple[Row, ...] = (
    Row(
        id="C1",
        what=f"fine preset, whole step, {THREADS} threads: what clipping by module adds to stock's clipping",
        unit="%",
        kind="at_most",
        bound=3.0,
        aim=1.0,
        measure=_overhead,
    ),
    Row(
        id="C2",
        what="one module, alpha 0: steps whose loss or norm differ in a bit from stock's clipping",
        unit="steps",
        kind="at_most",
        bound=0,
        measure=_bits,
    ),
    *(
        Row(
            id=f"C3-{layout}",
            what=f"{layout}: norm, GVC, threshold and ratio of every module against one process, relative",
            unit="x",
            kind="at_most",
            bound=1e-6,
            measure=partial(_agreement, layout=layout),
        )
        for layout in LAYOUTS
        if layout != "single"
    ),
    *(
        Row(
            id=f"C3-{layout}",
            what=f"DeepSpeed {layout}, 2 ranks: norm, GVC, threshold and ratio of every module against one process",
            unit="x",
            kind="at_most",
            bound=1e-6,
            measure=partial(_zero_agreement, layout=layout),
        )
        for layout in _zero_cases()
    ),
    *_demonstration_rows(),
)

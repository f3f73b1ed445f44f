"""The house: training with --megascale and every page resident. Exact against stock, as fast, as small."""

from __future__ import annotations

import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING

from scripts.comparison.presets import megascale_flags, page_size_bytes, preset_flags
from scripts.comparison.result import Comparison
from scripts.comparison.runner import Plan, compare
from scripts.measurements.house_exactness import exactness_rows
from scripts.measurements.rows import Context, Row
from scripts.measuring.processes import ROOT, Workers
from scripts.measuring.progress import say
from scripts.measuring.statistics import paired_ratio

if TYPE_CHECKING:
    from scripts.measurements.house_layer import LayerTimes

THREADS = 2
TOKENS = 1024
_LAYER_WARMUP, _LAYER_REPETITIONS = 4, 21
_LAYER_TIMEOUT_SECONDS = 900.0
_STEP_WARMUP, _STEPS, _STEP_BLOCKS = 3, 30, 15
_COMMAND_TIMEOUT_SECONDS = 1800.0

_BOUNDS = {
    # preset: (paged / stock, aim), (paged / bare products, aim), (whole step, aim)
    "coarse": ((1.0, 0.90), (1.25, 1.10), (1.0, 0.92)),
    "fine": ((0.85, 0.70), (1.40, 1.15), (0.92, 0.80)),
}


def _layer_times(context: Context, preset: str, *, bf16: bool) -> LayerTimes:
    """H4: stock's MoE layer, the paged one and the bare products in one process, in turn."""

    def measure() -> LayerTimes:
        arguments = {
            "flags": preset_flags(preset, data_path=context.data_path, train_iters=100, bf16=bf16),
            "page_size_bytes": page_size_bytes(preset, bf16=bf16),
            "tokens": TOKENS,
        }
        name = f"layer, {preset}, {'bf16' if bf16 else 'fp32'}"
        target = "scripts.measurements.house_layer:LayerBench"
        with Workers(target, ranks=1, threads=THREADS, name=name, arguments=arguments) as workers:
            (times,) = workers.call(
                "measure",
                timeout_seconds=_LAYER_TIMEOUT_SECONDS,
                warmup=_LAYER_WARMUP,
                repetitions=_LAYER_REPETITIONS,
            )
        assert times is not None
        say(f"    {times.describe()}")
        return times  # type: ignore[no-any-return]

    return context.once(("layer", preset, bf16), measure)


def _layer_rows() -> list[Row]:
    rows: list[Row] = []
    for preset, (against_stock, against_bare, _) in _BOUNDS.items():
        for bf16 in (False, True):
            dtype = "bf16" if bf16 else "fp32"
            for other, (bound, aim) in (("stock", against_stock), ("bare", against_bare)):
                rows.append(
                    Row(
                        id=f"H4-{preset}-{dtype}-{other}",
                        what=f"MoE layer, forward and backward, {preset} {dtype}, {THREADS} threads: paged / "
                        + ("stock" if other == "stock" else "its products alone"),
                        unit="x",
                        kind="at_most",
                        bound=bound,
                        aim=aim,
                        measure=partial(_layer_ratio, preset=preset, bf16=bf16, other=other),
                    )
                )
    return rows


def _layer_ratio(context: Context, *, preset: str, bf16: bool, other: str) -> float:
    times = _layer_times(context, preset, bf16=bf16)
    return paired_ratio(times.seconds["paged"], times.seconds[other]).median


def _comparison(context: Context, preset: str) -> Comparison:
    """H5, H6: whole runs in processes of their own, in turn."""
    plan = Plan(
        preset=preset,
        flags=preset_flags(preset, data_path=context.data_path, train_iters=_STEP_WARMUP + _STEPS),
        megascale_flags=megascale_flags(preset),
        ranks=1,
        threads=THREADS,
        warmup=_STEP_WARMUP,
        steps=_STEPS,
        repeats=_STEP_BLOCKS,
        validate=False,
    )
    return context.once(("comparison", preset), lambda: compare(plan))


def _comparison_rows() -> list[Row]:
    rows: list[Row] = []
    for preset, (_, _, (bound, aim)) in _BOUNDS.items():
        rows += [
            Row(
                id=f"H5-{preset}",
                what=f"whole training step, {preset}, fp32: megascale / stock",
                unit="x",
                kind="at_most",
                bound=bound,
                aim=aim,
                measure=partial(_step_ratio, preset=preset),
            ),
            Row(
                id=f"H6-{preset}",
                what=f"peak memory of the process, {preset}, fp32, all pages resident: megascale / stock",
                unit="x",
                kind="at_most",
                bound=1.02,
                aim=0.95,
                measure=partial(_memory_ratio, preset=preset),
            ),
        ]
    return sorted(rows, key=lambda row: row.id)


def _step_ratio(context: Context, *, preset: str) -> float:
    return 1 / _comparison(context, preset).speed.median


def _memory_ratio(context: Context, *, preset: str) -> float:
    return _comparison(context, preset).total_ratio("peak_rss_bytes")


def _seconds_of(*command: str) -> float:
    """How long a command of the repository takes. Raises RuntimeError where it fails or does not end."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_COMMAND_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{' '.join(command)} did not end in {_COMMAND_TIMEOUT_SECONDS:.0f} s") from error
    seconds = time.monotonic() - start
    if done.returncode:
        tail = "\n".join(done.stdout.decode(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"{' '.join(command)} failed with status {done.returncode}:\n{tail}")
    return seconds


def _command_row(row_id: str, what: str, script: str, *, bound: float, aim: float) -> Row:
    def measure(context: Context) -> float:
        _seconds_of("bash", "scripts/setup_env.sh")  # what is installed already takes no time from here on
        return _seconds_of("bash", script)

    return Row(id=row_id, what=what, unit="s", kind="at_most", bound=bound, aim=aim, measure=measure)


ROWS: tuple[Row, ...] = (
    *exactness_rows(),
    *_layer_rows(),
    *_comparison_rows(),
    _command_row("H7-quickstart", "the quickstart, after the install", "scripts/quickstart.sh", bound=300, aim=180),
    _command_row("H7-suite", "lint, types and the whole test suite", "scripts/test.sh", bound=240, aim=150),
)

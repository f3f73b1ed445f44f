"""Tokens and experts across ranks: what travels, against the better of stock's two dispatchers; exactness; rounds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from scripts.comparison.presets import preset_flags
from scripts.exactness.layouts import LAYOUTS, MEGASCALE_FLAGS
from scripts.exactness.runner import prove
from scripts.exactness.verdict import Verdict
from scripts.measurements.rows import Context, Row
from scripts.measuring.processes import Workers
from scripts.measuring.progress import say
from scripts.measuring.statistics import paired_ratio

if TYPE_CHECKING:
    from scripts.measurements.distributed_layer import Travelled

TOKENS = 1024
_START_AND_COUNT_SECONDS = 300.0
_TIMES_SECONDS = 600.0
_WARMUP, _REPETITIONS = 3, 21
_MIB = 2**20


def layer_flags(context: Context, preset: str, ranks: int) -> tuple[str, ...]:
    """Flags of a layer of the preset with its experts on ``ranks`` ranks."""
    flags = preset_flags(preset, data_path=context.data_path, train_iters=100)
    sizes = ("--expert-model-parallel-size", str(ranks), "--global-batch-size", str(8 * ranks))
    return (*flags, *sizes)


# --- bytes ------------------------------------------------------------------------------------------------------------


def _travelled(context: Context, preset: str, routing: str) -> dict[str, int]:
    """Bytes of all ranks, by dispatcher; ``rows``: what the rows of the ids' own placement take."""

    def measure() -> dict[str, int]:
        arguments = {"flags": layer_flags(context, preset, 4), "tokens": TOKENS, "routing": routing}
        target = "scripts.measurements.distributed_layer:DispatchBench"
        with Workers(target, ranks=4, threads=1, name=f"bytes, {preset}, {routing}", arguments=arguments) as workers:
            found: list[Travelled] = workers.call("travelled", timeout_seconds=_START_AND_COUNT_SECONDS)
        total = {name: sum(one.sent_bytes[name] for one in found) for name in found[0].sent_bytes}
        total["rows"] = sum(one.row_bytes for one in found)
        mib = ", ".join(f"{name} {count / 4 / _MIB:.3f}" for name, count in total.items())
        better = min(total["alltoall"], total["allgather"])
        say(f"    {preset}, {routing}, MiB a rank: {mib}; rows alone {total['rows'] / better:.4f} of the better stock")
        return total

    return context.once(("bytes", preset, routing), measure)


def _share_of(context: Context, *, preset: str, routing: str, other: str) -> float:
    total = _travelled(context, preset, routing)
    beside = min(total["alltoall"], total["allgather"]) if other == "better" else total[other]
    return total["groups"] / beside


def _byte_rows() -> list[Row]:
    """D1, D2: against the better of the two, against each, and over the rows that have to travel."""
    rows = []
    for row_id, preset, bound, aim in (("D1", "fine", 0.85, 0.82), ("D2", "coarse", 0.95, 0.92)):
        what = f"bytes of a layer's forward and backward, {preset}, EP4, uniform routing: groups / "
        for other, most in (("better", bound), ("alltoall", 1.0), ("allgather", 1.0), ("rows", 1.02)):
            name = {"better": "the better stock dispatcher", "rows": "the rows alone"}.get(other, f"stock's {other}")
            rows.append(
                Row(
                    id=row_id if other == "better" else f"{row_id}-{other}",
                    what=what + name,
                    unit="x",
                    kind="at_most",
                    bound=most,
                    aim=aim if other == "better" else None,
                    measure=partial(_share_of, preset=preset, routing="uniform", other=other),
                )
            )
    return rows


# --- time -------------------------------------------------------------------------------------------------------------


def _seconds(context: Context, preset: str, ranks: int) -> dict[str, list[float]]:
    """Of the slowest rank, by dispatcher and repetition."""

    def measure() -> dict[str, list[float]]:
        arguments = {"flags": layer_flags(context, preset, ranks), "tokens": TOKENS}
        target = "scripts.measurements.distributed_layer:DispatchBench"
        with Workers(target, ranks=ranks, threads=1, name=f"time, {preset}, EP{ranks}", arguments=arguments) as workers:
            found: list[dict[str, list[float]]] = workers.call(
                "seconds", timeout_seconds=_TIMES_SECONDS, warmup=_WARMUP, repetitions=_REPETITIONS
            )
        slowest = {name: np.max([one[name] for one in found], axis=0).tolist() for name in found[0]}
        medians = ", ".join(f"{name} {1000 * float(np.median(times)):.1f} ms" for name, times in slowest.items())
        say(f"    {preset}, EP{ranks}: {medians}")
        return slowest

    return context.once(("time", preset, ranks), measure)


def _time_ratio(context: Context, *, preset: str, ranks: int) -> float:
    """Over the stock dispatcher that is faster in the median."""
    seconds = _seconds(context, preset, ranks)
    faster = min(("alltoall", "allgather"), key=lambda name: float(np.median(seconds[name])))
    return paired_ratio(seconds["groups"], seconds[faster]).median


def _time_row(row_id: str, ranks: int, *, bound: float, aim: float | None) -> Row:
    return Row(
        id=row_id,
        what=f"a layer's forward and backward, fine, EP{ranks}: groups / the faster stock dispatcher",
        unit="x",
        kind="at_most",
        bound=bound,
        aim=aim,
        measure=partial(_time_ratio, preset="fine", ranks=ranks),
    )


# --- exactness --------------------------------------------------------------------------------------------------------

_MODES = {
    "tokens": ("ep2dp2", "--megascale-move tokens"),
    "pages": ("ep2dp2_distopt", "--megascale-move pages"),
    "gossip": ("ep2", "--megascale-move auto --megascale-discovery gossip"),
    "pipeline": ("pp2ep2", "--megascale-move pages"),
    "bf16": ("bf16_ep2dp2_distopt", "--megascale-move auto"),
    "bf16-pages": ("bf16_ep2dp2_distopt", "--megascale-move pages"),
}
"""Mode: the layout that is proved with it, and the flags."""


def _verdict(context: Context, mode: str) -> Verdict:
    name, options = _MODES[mode]
    layout = next(layout for layout in LAYOUTS if layout.name == name)
    flags = (*MEGASCALE_FLAGS, "--megascale-dispatcher", "groups", *options.split())
    return context.once(("proof", mode), lambda: prove(layout, data_path=context.data_path, megascale_flags=flags))


def _worst(context: Context, mode: str) -> float:
    """The worst deviation, of steps and free run; infinite where the mutant was not caught."""
    verdict = _verdict(context, mode)
    if verdict.mutant is not None and not verdict.mutant.caught:
        return float("inf")
    return max(verdict.worst_share, verdict.free_share)


def _exactness_rows() -> list[Row]:
    def measured(mode: str) -> Callable[[Context], float]:
        return lambda context: _worst(context, mode)

    return [
        Row(
            id=f"D8-{mode}",
            what=f"100 steps and a free run against stock, {layout} with {flags}: the worst deviation",
            unit="of its bound" if "bf16" not in mode else "of twice the control's",
            kind="at_most",
            bound=1.0,
            measure=measured(mode),
        )
        for mode, (layout, flags) in _MODES.items()
    ]


ROWS: tuple[Row, ...] = (
    *_byte_rows(),
    _time_row("D5", 2, bound=0.90, aim=0.60),
    _time_row("D5-ep4", 4, bound=1.0, aim=None),
    *_exactness_rows(),
)

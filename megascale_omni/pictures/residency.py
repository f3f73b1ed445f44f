"""Residency as a picture: bytes by tier, page faults and stalls over the steps of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megascale_omni.heat.report import Line, RankReport, of_newest_ranks
from megascale_omni.pictures.canvas import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIER_COLOURS = {"device": "#d1495b", "host": "#edae49", "disk": "#7fb2e5"}
MOST_COLUMNS = 300
"""Of more steps several together are one column: their means."""

TIER_LABELS = {"device": "device memory", "host": "host memory", "disk": "disk"}


def residency_series(reports: Sequence[RankReport]) -> dict[str, np.ndarray]:
    """Series over steps, summed over ranks: ``step``, bytes by tier, ``limit`` of the device (NaN: none), and per step
    ``faults``, ``loaded`` and ``written`` bytes and those that ``lru`` would have loaded, ``emergencies``,
    ``stall_seconds`` (the worst rank's) and ``seconds``.

    Raises:
        ValueError: no step was written by all ranks.
    """
    lines = _steps_of_all(reports)
    if not lines:
        raise ValueError("the report has no step: the run ended before the end of its first one")

    def total(*keys: str) -> np.ndarray:
        return np.array([sum(_number(line, *keys) for line in of_ranks) for of_ranks in lines])

    def each(key: str, join: Callable[[Iterable[float]], float] = sum) -> np.ndarray:
        """What a counter rose by in each step."""
        return np.array([join(_number(line, "rises", key) for line in of_ranks) for of_ranks in lines])

    return {
        "step": np.array([of_ranks[0]["step"] for of_ranks in lines]),
        **{tier: total("tiers", tier) for tier in TIER_COLOURS},
        "limit": np.array([_limit(of_ranks) for of_ranks in lines]),
        "faults": each("page_faults"),
        "loaded": each("bytes_loaded"),
        "written": each("bytes_written"),
        "lru": each("bytes_loaded_by_lru"),
        "emergencies": each("emergencies"),
        "stall_seconds": each("stall_microseconds", max) / 1e6,
        "seconds": np.array([_number(of_ranks[0], "step_seconds") for of_ranks in lines]),
    }


def _steps_of_all(reports: Sequence[RankReport]) -> list[list[Line]]:
    """For each step that all ranks of its time have written, their lines; ``rises`` are what counters rose by.

    Ranks that the run does not have any more may tell of steps that the others have made again.
    """
    by_step: dict[int, list[Line]] = {}
    for report in reports:
        before: dict[str, int] = {}
        for line in report.steps:
            rises = {name: count - before.get(name, 0) for name, count in line["counts"].items()}
            by_step.setdefault(line["step"], []).append({**line, "rises": rises})
            before = line["counts"]
    same = ([line for line in by_step[n] if line["world"] == by_step[n][0]["world"]] for n in sorted(by_step))
    return [lines for lines in same if len(lines) >= (lines[0]["world"] or len(reports))]


def _number(line: Line, *keys: str) -> float:
    value: Any = line
    for key in keys:
        value = value.get(key, 0)
    return float(value)


def _limit(lines: Sequence[Line]) -> float:
    limits = [line["limit_bytes"] for line in lines]
    return float(sum(limits)) if all(limit is not None for limit in limits) else np.nan


def budgets_of(series: Mapping[str, np.ndarray]) -> list[tuple[float, float]]:
    """(step, bytes) from which step on which device budget held; none where everything stays."""
    limits = series["limit"]
    changes = [0, *(np.nonzero(np.diff(limits))[0] + 1).tolist()]
    return [(float(series["step"][at]), float(limits[at])) for at in changes if np.isfinite(limits[at])]


def draw_residency(reports: Sequence[RankReport], path: str | Path) -> None:
    """Writes the picture. Raises ValueError where there is nothing to draw."""
    whole = residency_series(reports)
    series, edges = _columns(whole)
    unit, name = _unit(max(float(np.sum([series[tier] for tier in TIER_COLOURS], axis=0).max()), 1.0))
    figure = new_figure(10, 8)
    places, moved, stalls = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
    _draw_places(places, series, edges, unit=unit)
    places.set_ylabel(f"pages, {name}")
    places.set_title(f"where the pages of {_experts(reports):,} experts are", loc="left", pad=22)
    places.set_xlim(edges[0], edges[-1])
    _draw_moved(moved, series, edges, unit=unit)
    moved.set_ylabel(f"moved a step, {name}")
    moved.set_title(_moved_title(whole), loc="left")
    _draw_stalls(stalls, series, edges)
    stalls.set_title(_waiting_title(whole), loc="left")
    each = -(-len(whole["step"]) // len(series["step"]))
    stalls.set_xlabel("training step" + f" (a column: {each} steps, their mean)" * (each > 1))
    save(figure, path)


def _columns(series: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The series, of many steps by columns of several; and the columns' edges.

    A column has the means of its steps, but the smallest budget, and all emergencies.
    """
    each = -(-len(series["step"]) // MOST_COLUMNS)
    begins = np.arange(0, len(series["step"]), each)
    sizes = np.diff(np.append(begins, len(series["step"])))
    columns = {name: np.add.reduceat(values, begins) / sizes for name, values in series.items()}
    columns["limit"] = np.minimum.reduceat(series["limit"], begins)
    columns["emergencies"] = np.add.reduceat(series["emergencies"], begins)
    # Every step is as wide as the way to the next one.
    return columns, np.append(series["step"][begins], series["step"][-1] + 1) - 0.5


def _draw_places(axes: Axes, series: Mapping[str, np.ndarray], edges: np.ndarray, *, unit: float) -> None:
    """Bytes by tier, one upon the other; the budget as it was at each step; and when memory ran out."""
    below = np.zeros(len(edges) - 1)
    for tier in (tier for tier in TIER_COLOURS if series[tier].any()):
        above = below + series[tier] / unit
        axes.stairs(above, edges, baseline=below, fill=True, color=TIER_COLOURS[tier], label=TIER_LABELS[tier])
        below = above
    if np.isfinite(series["limit"]).any():
        limits = series["limit"] / unit
        axes.stairs(limits, edges, baseline=None, color="black", linestyle="--", linewidth=1.2, label="device budget")
    when = series["step"][series["emergencies"] > 0]
    if len(when):
        top = np.full(len(when), 0.96)
        axes.plot(
            *(when, top),
            transform=axes.get_xaxis_transform(),
            color="black",
            linestyle="none",
            marker="v",
            label="emergency: memory ran out",
        )
    axes.set_ylim(bottom=0)
    _legend(axes, under_title=True)


def _draw_moved(axes: Axes, series: Mapping[str, np.ndarray], edges: np.ndarray, *, unit: float) -> None:
    """Bytes that came above the line, bytes written below it."""
    loaded, written = series["loaded"] / unit, series["written"] / unit
    axes.stairs(loaded, edges, fill=True, color=TIER_COLOURS["device"], label="brought to the device")
    axes.stairs(-written, edges, fill=True, color=TIER_COLOURS["disk"], label="written to disk")
    axes.axhline(0, color="black", linewidth=0.6)
    axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    _legend(axes)


def _moved_title(series: Mapping[str, np.ndarray]) -> str:
    title = f"{int(series['faults'].sum()):,} page faults in {_counted(len(series['step']), 'step')}"
    lru = series["lru"].sum()
    return title + f"; {100 * series['loaded'].sum() / lru:.0f} % of LRU's page-ins" if lru else title


def _draw_stalls(axes: Axes, series: Mapping[str, np.ndarray], edges: np.ndarray) -> None:
    """Seconds a step, and of these seconds of waiting."""
    from matplotlib.ticker import MaxNLocator

    first = _first_of(series["step"])
    seconds, waiting, edges = series["seconds"][first:], series["stall_seconds"][first:], edges[first:]
    axes.stairs(waiting, edges, fill=True, color=TIER_COLOURS["device"], label="waiting for pages")
    axes.stairs(seconds, edges, baseline=None, color="#555", linewidth=1.2, label="whole step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    _legend(axes)


def _first_of(steps: np.ndarray) -> int:
    """The first step has another length: nothing was known yet. It must not hide the others, where there are some."""
    return 1 if len(steps) > 2 else 0


def _waiting_title(series: Mapping[str, np.ndarray]) -> str:
    first = _first_of(series["step"])
    share = series["stall_seconds"][first:].sum() / max(series["seconds"][first:].sum(), 1e-9)
    return f"{100 * share:.0f} % of the time is spent waiting for pages" + " (first step left out)" * first


def _legend(axes: Axes, *, under_title: bool = False) -> None:
    """Above the panel: at its right, or where that needs the whole width, in a line of its own."""
    axes.legend(
        loc="lower left" if under_title else "lower right",
        bbox_to_anchor=(0, 1) if under_title else (1, 1),
        ncols=5,
        frameon=False,
        borderaxespad=0.2,
        fontsize=9,
        columnspacing=1.2,
    )


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _experts(reports: Sequence[RankReport]) -> int:
    return sum(int(str(module["experts"])) for report in of_newest_ranks(reports) for module in report.modules)


def _unit(most: float) -> tuple[float, str]:
    for name, unit in (("GiB", 2**30), ("MiB", 2**20)):
        if most >= unit:
            return float(unit), name
    return 1024.0, "KiB"

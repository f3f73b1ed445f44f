"""Residency as a picture: bytes by tier, page faults and stalls over the steps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megascale_omni.heat.report import RankReport
from megascale_omni.pictures.canvas import new_figure, save

TIER_COLOURS = {"device": "#d1495b", "host": "#edae49", "disk": "#7fb2e5"}
TIER_LABELS = {"device": "device memory", "host": "host memory", "disk": "disk"}


def residency_series(reports: Sequence[RankReport]) -> dict[str, np.ndarray]:
    """Series over steps, summed over ranks: ``step``, bytes by tier, and per step ``faults``, ``loaded`` and
    ``written`` bytes and those that ``lru`` would have loaded, ``stall_seconds`` (the worst rank's) and ``seconds``.

    Raises:
        ValueError: no step was written.
    """
    length = min((len(report.steps) for report in reports), default=0)
    if length < 2:
        raise ValueError("the report has fewer than two steps: the run ended before the end of its second one")

    def total(*keys: str) -> np.ndarray:
        return np.sum([_column(report, length, *keys) for report in reports], axis=0)  # type: ignore[no-any-return]

    def rate(key: str) -> np.ndarray:
        return np.diff(total("counts", key), prepend=0.0)

    stalls = np.max([np.diff(_column(r, length, "counts", "stall_microseconds"), prepend=0) for r in reports], axis=0)
    return {
        "step": _column(reports[0], length, "step"),
        **{tier: total("tiers", tier) for tier in TIER_COLOURS},
        "faults": rate("page_faults"),
        "loaded": rate("bytes_loaded"),
        "written": rate("bytes_written"),
        "lru": rate("bytes_loaded_by_lru"),
        "stall_seconds": stalls / 1e6,
        "seconds": _column(reports[0], length, "step_seconds"),
    }


def _column(report: RankReport, length: int, *keys: str) -> np.ndarray:
    column = []
    for line in report.steps[:length]:
        value: object = line
        for key in keys:
            value = value.get(key, 0) if isinstance(value, dict) else 0
        column.append(float(str(value)))
    return np.array(column)


def draw_residency(reports: Sequence[RankReport], path: str | Path) -> None:
    """Writes the picture. Raises ValueError where there is nothing to draw."""
    from matplotlib.ticker import MaxNLocator

    series = residency_series(reports)
    steps, unit, name = series["step"], *_unit(max(float(np.sum([series[t] for t in TIER_COLOURS], axis=0).max()), 1.0))
    figure = new_figure(10, 8)
    places, moved, stalls = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
    used = [tier for tier in TIER_COLOURS if series[tier].any()]
    places.stackplot(
        steps,
        *(series[tier] / unit for tier in used),
        labels=[TIER_LABELS[tier] for tier in used],
        colors=[TIER_COLOURS[tier] for tier in used],
        linewidth=0,
    )
    limits = [report.limit_bytes for report in reports if report.limit_bytes is not None]
    if limits:
        places.axhline(sum(limits) / unit, color="black", linestyle="--", linewidth=1, label="device budget")
    places.set_ylabel(f"pages, {name}")
    places.set_title(f"where the pages of {_experts(reports)} experts are", loc="left")
    places.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, borderaxespad=0.2)
    places.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)

    moved.bar(steps, series["loaded"] / unit, width=1.0, color=TIER_COLOURS["device"], label="brought to the device")
    moved.bar(steps, -series["written"] / unit, width=1.0, color=TIER_COLOURS["disk"], label="written to disk")
    moved.axhline(0, color="black", linewidth=0.6)
    moved.set_ylabel(f"moved a step, {name}")
    moved.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    moved.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, borderaxespad=0.2)
    title = f"{int(series['faults'].sum())} page faults in {len(steps)} steps"
    lru = series["lru"].sum()
    if lru:
        title += f"; {100 * series['loaded'].sum() / lru:.0f} % of LRU's page-ins"
    moved.set_title(title, loc="left")

    # The first steps have another length: nothing was known yet. They must not hide the others.
    stalls.plot(steps[1:], series["seconds"][1:], color="#555", linewidth=1.2, label="whole step")
    stalls.fill_between(steps[1:], series["stall_seconds"][1:], color=TIER_COLOURS["device"], label="waiting for pages")
    stalls.xaxis.set_major_locator(MaxNLocator(integer=True))
    stalls.set_ylabel("seconds")
    stalls.set_xlabel("training step")
    stalls.set_ylim(bottom=0)
    share = series["stall_seconds"][1:].sum() / max(series["seconds"][1:].sum(), 1e-9)
    stalls.set_title(f"{100 * share:.0f} % of the time is spent waiting for pages (first step left out)", loc="left")
    stalls.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, borderaxespad=0.2)
    save(figure, path)


def _experts(reports: Sequence[RankReport]) -> int:
    return sum(int(str(module["experts"])) for report in reports for module in report.modules)


def _unit(most: float) -> tuple[float, str]:
    for name, unit in (("GiB", 2**30), ("MiB", 2**20)):
        if most >= unit:
            return float(unit), name
    return 1024.0, "KiB"

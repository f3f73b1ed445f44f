"""Losses and norms of all methods in one picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.cmsa_demo.clippers import METHODS
from scripts.cmsa_demo.train import Run, medians

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = dict(zip(METHODS, ("#999999", "#d55e00", "#0072b2", "#e69f00", "#66c2a5", "#007a55"), strict=True))
_MODULE_COLORS = {"encoder": "#cc79a7", "aligner": "#56b4e9", "generator": "#000000"}


def draw(runs: Sequence[Run], path: Path) -> None:
    """Above: loss curves of all seeds, oscillation and spread; below: norms after clipping, a panel a method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(16, 9), layout="constrained")
    above, below = figure.subfigures(2, 1)
    losses, oscillation, spread = above.subplots(1, 3, width_ratios=(2.2, 1, 1))
    for run in runs:
        losses.plot(run.losses, color=_COLORS[run.method], alpha=0.15, linewidth=0.6)
    for method, color in _COLORS.items():
        of_seeds = zip(*(run.losses for run in runs if run.method == method), strict=True)
        losses.plot([statistics.median(step) for step in of_seeds], color=color, linewidth=1.4, label=method)
    losses.set(xlabel="step", ylabel="loss", yscale="log", title="Loss: median of seeds, and all seeds")
    losses.legend(fontsize=8)
    _bars(oscillation, runs, key="oscillation", title="Loss oscillation")
    _bars(spread, runs, key="spread", title="Spread of log10 norms")
    panels = below.subplots(1, len(METHODS), sharey=True)
    for axes, method in zip(panels, METHODS, strict=True):
        run = next(run for run in runs if run.method == method)
        for module, color in _MODULE_COLORS.items():
            axes.plot([norms[module] for norms in run.after], color=color, linewidth=0.7, label=module)
        axes.set(yscale="log", xlabel="step")
        axes.set_title(method, fontsize=10)
    panels[0].set_ylabel("gradient norm after clipping")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bars(axes: Axes, runs: Sequence[Run], *, key: str, title: str) -> None:
    values = [medians(runs, method)[key] for method in METHODS]
    names = [name.replace(" by ", "\nby ").replace(", ", ",\n") for name in METHODS]
    bars = axes.barh(names, values, color=list(_COLORS.values()))
    axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_title(f"{title}, median of seeds", fontsize=10)
    axes.tick_params(labelsize=8)
    axes.locator_params(axis="x", nbins=4)

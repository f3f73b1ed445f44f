"""The heat map as a picture: experts from top to bottom, time from left to right, states as colours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megascale_omni.heat.report import RankReport
from megascale_omni.heat.states import Heat
from megascale_omni.pictures.canvas import new_figure, save

COLOURS = {Heat.FROZEN: "#2c3e70", Heat.COLD: "#7fb2e5", Heat.WARM: "#f6e3b4", Heat.HOT: "#d1495b"}
LABELS = {
    Heat.FROZEN: "frozen: its pages were sent away",
    Heat.COLD: "cold: hardly used, and idle",
    Heat.WARM: "warm",
    Heat.HOT: "hot",
}
MOST_LABELS = 40


def heat_grid(reports: Sequence[RankReport]) -> tuple[np.ndarray, list[int], list[tuple[int, str]]]:
    """States ``[experts, looks]``, the step of each look, and where each module's rows begin, with its name.

    Raises:
        ValueError: no look at the heat map was written.
    """
    looks = min((len(report.heat) for report in reports), default=0)
    if not looks:
        raise ValueError(
            "the report has no heat: the run ended before heat.refresh_steps steps, or with heat.enabled false"
        )
    rows: list[list[int]] = []
    begins: list[tuple[int, str]] = []
    for report in reports:
        for number, module in enumerate(report.modules):
            name = _short(str(module["path"]))
            begins.append((len(rows), name if len(reports) == 1 else f"rank {report.rank}, {name}"))
            columns = [look["states"][number] for look in report.heat[:looks]]  # type: ignore[index]
            rows += [[int(column[expert]) for column in columns] for expert in range(len(columns[0]))]
    steps = [int(str(look["step"])) for look in reports[0].heat[:looks]]
    return np.array(rows), steps, begins


def _short(path: str) -> str:
    """``chunk 0: decoder.layers.3.mlp.experts`` as ``layer 3``."""
    parts = path.split(".")
    chunk = "" if path.startswith("chunk 0:") or "chunk" not in path else path.split(":")[0] + ", "
    return f"{chunk}layer {parts[parts.index('layers') + 1]}" if "layers" in parts[:-1] else path


def draw_heat(reports: Sequence[RankReport], path: str | Path) -> None:
    """Writes the picture. Raises ValueError where there is nothing to draw."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    grid, steps, begins = heat_grid(reports)
    figure = new_figure(10, min(16.0, max(4.0, 1.8 + 0.16 * len(grid))))
    axes = figure.add_subplot()
    colours = ListedColormap([COLOURS[state] for state in Heat])
    every = steps[1] - steps[0] if len(steps) > 1 else max(1, steps[0])
    axes.imshow(
        grid,
        aspect="auto",
        interpolation="nearest",
        cmap=colours,
        vmin=-0.5,
        vmax=len(Heat) - 0.5,
        extent=(steps[0] - every, steps[-1], len(grid), 0),
    )
    for row, _ in begins[1:]:
        axes.axhline(row, color="white", linewidth=2.5)
    ends = [row for row, _ in begins[1:]] + [len(grid)]
    shown = begins if len(begins) <= MOST_LABELS else begins[:: -(-len(begins) // MOST_LABELS)]
    middles = {row: (row + end) / 2 for (row, _), end in zip(begins, ends, strict=True)}
    axes.set_yticks([middles[row] for row, _ in shown], [name for _, name in shown])
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("training step")
    axes.set_ylabel("experts of each layer, from 0 downwards")
    counts = {state: float((grid[:, -1] == state).mean()) for state in Heat}
    axes.set_title(
        f"{len(grid)} experts over {steps[-1]} steps; at the end "
        + ", ".join(f"{100 * counts[state]:.0f} % {state.name.lower()}" for state in reversed(Heat)),
        loc="left",
    )
    handles = [Patch(facecolor=COLOURS[state], label=LABELS[state], edgecolor="#888") for state in reversed(Heat)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    save(figure, path)

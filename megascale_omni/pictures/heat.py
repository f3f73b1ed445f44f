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
MOST_ROWS = 800
"""Experts that have a row of their own; of more, each layer's states are put in order, and areas tell how many."""

ROWS, COLUMNS = 1600, 1000
"""Of the image, at most."""


def heat_grid(reports: Sequence[RankReport]) -> tuple[np.ndarray, list[int], list[tuple[int, str]]]:
    """States ``[experts, looks]``, the step of each look, and where each module's rows begin, with its name.

    Raises:
        ValueError: no look at the heat map was written.
    """
    seen = [{int(look["step"]): look for look in report.heat} for report in reports]
    steps = sorted(set.intersection(*(set(looks) for looks in seen))) if seen else []
    if not steps:
        raise ValueError("the report has no heat: the run ended before its first step, or with heat.enabled false")
    rows: list[list[int]] = []
    begins: list[tuple[int, str]] = []
    for report, looks in zip(reports, seen, strict=True):
        for number, module in enumerate(report.modules):
            name = _short(str(module["path"]))
            begins.append((len(rows), name if len(reports) == 1 else f"rank {report.rank}, {name}"))
            columns = [looks[step]["states"][number] for step in steps]
            rows += [[int(column[expert]) for column in columns] for expert in range(len(columns[0]))]
    return np.array(rows), steps, begins


def _short(path: str) -> str:
    """``chunk 0: decoder.layers.3.mlp.experts`` as ``layer 3``."""
    parts = path.split(".")
    chunk = "" if path.startswith("chunk 0:") or "chunk" not in path else path.split(":")[0] + ", "
    return f"{chunk}layer {parts[parts.index('layers') + 1]}" if "layers" in parts[:-1] else path


def image_of(grid: np.ndarray, steps: Sequence[int], ends: Sequence[int]) -> tuple[np.ndarray, tuple[float, float]]:
    """States ``[rows, columns]`` to be drawn, and the steps at the image's left and right.

    A look tells of the steps since the one before. Columns are equally wide, whatever lies between two looks. Of many
    experts every layer gets an equal part of the rows, in which its states are in order.
    """
    first = steps[0] - (steps[1] - steps[0] if len(steps) > 1 else steps[0])
    left, right = float(max(0, first)), float(steps[-1])
    count = min(COLUMNS, max(1, int(right - left)))
    centres = left + (np.arange(count) + 0.5) * (right - left) / count
    image = grid[:, np.searchsorted(np.array(steps), centres)]
    if len(grid) > MOST_ROWS:
        each = max(1, ROWS // len(ends))
        parts = []
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            ordered = -np.sort(-image[begin:end], axis=0)
            parts.append(ordered[((np.arange(each) + 0.5) * len(ordered) / each).astype(int)])
        image = np.concatenate(parts)
    return image, (left, right)


def draw_heat(reports: Sequence[RankReport], path: str | Path) -> None:
    """Writes the picture. Raises ValueError where there is nothing to draw."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    grid, steps, begins = heat_grid(reports)
    ends = [row for row, _ in begins[1:]] + [len(grid)]
    image, (left, right) = image_of(grid, steps, ends)
    many = len(grid) > MOST_ROWS
    figure = new_figure(10, min(16.0, max(4.0, 1.8 + 0.16 * len(grid))))
    axes = figure.add_subplot()
    axes.imshow(
        image,
        aspect="auto",
        interpolation="nearest",
        cmap=ListedColormap([COLOURS[state] for state in Heat]),
        vmin=-0.5,
        vmax=len(Heat) - 0.5,
        extent=(left, right, len(begins), 0) if many else (left, right, len(grid), 0),
    )
    bounds = np.arange(len(begins) + 1) if many else np.array([row for row, _ in begins] + [len(grid)])
    for row in bounds[1:-1]:
        axes.axhline(row, color="white", linewidth=2.5 if len(begins) <= MOST_LABELS else 0.7)
    middles = (bounds[:-1] + bounds[1:]) / 2
    every = -(-len(begins) // MOST_LABELS)
    axes.set_yticks(middles[::every], [name for _, name in begins[::every]])
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("training step")
    axes.set_ylabel("experts of each layer, hot ones on top" if many else "experts of each layer, from 0 downwards")
    counts = {state: float((grid[:, -1] == state).mean()) for state in Heat}
    axes.set_title(
        f"{len(grid):,} experts, steps {left + 1:,.0f} to {right:,.0f}; at the end "
        + ", ".join(f"{100 * counts[state]:.0f} % {state.name.lower()}" for state in reversed(Heat)),
        loc="left",
    )
    handles = [Patch(facecolor=COLOURS[state], label=LABELS[state], edgecolor="#888") for state in reversed(Heat)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    save(figure, path)

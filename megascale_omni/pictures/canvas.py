"""Where pictures are drawn: on files, without a display."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, inches wide and high. ImportError names the extra where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'megascale[pictures]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: str | Path) -> None:
    """Writes a PNG. Raises ValueError where the file cannot be written."""
    try:
        figure.savefig(path, dpi=130, format="png")
    except OSError as error:
        raise ValueError(f"picture {path} cannot be written: {error.strerror}") from error

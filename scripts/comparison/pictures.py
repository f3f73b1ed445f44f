"""A comparison as a picture: both losses over each other, memory over time, and what it comes to."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.comparison.result import Comparison, Run
from scripts.measuring.units import plain_bytes

_COLOURS = ("#7f7f7f", "#d1495b", "#2e6f95", "#e09f3e", "#5a7d4f")
_STYLE = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
_GIB = 2.0**30


def draw(comparison: Comparison, path: Path) -> None:
    """Write the picture as PNG. Raises ImportError that names the extra where matplotlib is not installed."""
    pyplot = _pyplot()
    runs = list(comparison.runs)
    with pyplot.rc_context(_STYLE):
        figure, (loss, memory, bars) = pyplot.subplots(
            1, 3, figsize=(15, 4.8), gridspec_kw={"width_ratios": [5, 5, 3]}, layout="constrained"
        )
        _draw_losses(loss, runs, comparison.loss_difference)
        _draw_memory(memory, runs)
        _draw_speed(bars, runs, [comparison.speed_of(run.name).median for run in comparison.others])
        figure.suptitle(f"The same model, {comparison.preset}: stock and MegaScale", weight="bold")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def draw_scripts(
    losses: Mapping[str, Sequence[float]], seconds: Mapping[str, Sequence[float]], *, title: str, path: Path
) -> None:
    """Write losses and times of steps by run, in order of runs, as PNG. Raises ImportError as :func:`draw`."""
    pyplot = _pyplot()
    with pyplot.rc_context(_STYLE):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
        for number, (name, colour) in enumerate(zip(losses, _COLOURS, strict=False)):
            width = max(1.0, 5.0 / 2**number)
            left.plot(range(1, len(losses[name]) + 1), losses[name], color=colour, linewidth=width, label=name)
            first = 1 + len(losses[name]) - len(seconds[name])  # a script may not tell how long its first steps took
            right.plot(range(first, len(losses[name]) + 1), seconds[name], color=colour, marker="o", label=name)
        left.set(title="Loss", xlabel="step", ylabel="training loss")
        right.set(title="Time of a step", xlabel="step", ylabel="seconds")
        right.set_ylim(bottom=0)
        for axes in (left, right):
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.25)
            axes.legend(frameon=False)
        figure.suptitle(title, weight="bold")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def _pyplot() -> Any:  # noqa: ANN401 - a module without types
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("the picture needs matplotlib: install the extra 'dev' of this project") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _colour(runs: list[Run], run: Run) -> str:
    return _COLOURS[runs.index(run) % len(_COLOURS)]


def _draw_losses(axes, runs: list[Run], difference: float) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    for number, run in enumerate(runs):  # each line thinner than the one below, which stays visible
        losses = [step.loss for step in run.steps]
        width = max(1.0, 5.0 / 2**number)
        colour = _colour(runs, run)
        axes.plot(range(1, len(losses) + 1), losses, color=colour, linewidth=width, label=run.name)
        if run.validation_loss is not None:
            label = f"validation at the end: {run.validation_loss:.3f}" if run is runs[-1] else None
            size = max(4.0, 13.0 - 5.0 * number)
            axes.plot(len(losses), run.validation_loss, "D", color=colour, markersize=size, clip_on=False, label=label)
    axes.set(title=f"Loss: largest difference {difference:.1e}", xlabel="step", ylabel="training loss (nats a byte)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _draw_memory(axes, runs: list[Run]) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    for run in runs:
        label = f"{run.name}: peak {plain_bytes(run.total('peak_rss_bytes'))}"
        times = [sample.seconds for sample in run.memory]
        values = [sample.resident_bytes / _GIB for sample in run.memory]
        axes.plot(times, values, color=_colour(runs, run), linewidth=1.8, label=label)
    axes.set(title="Resident memory while training", xlabel="seconds of training", ylabel="GiB")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")


def _draw_speed(axes, runs: list[Run], speeds: list[float]) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    bars = axes.bar(
        [run.name.replace(" ", "\n") for run in runs],
        [run.tokens_per_second for run in runs],
        color=[_colour(runs, run) for run in runs],
        width=0.6,
    )
    axes.tick_params(axis="x", labelsize=8 if len(runs) > 3 else 11)  # beyond three, names would touch
    axes.margins(y=0.12)
    axes.bar_label(bars, labels=[f"{run.tokens_per_second:,.0f}" for run in runs], padding=3)
    axes.set(title=f"Speed: {', '.join(f'{s:.2f}' for s in speeds)} x stock", ylabel="tokens a second")

"""Gradient clipping over time: norms and thresholds, spread, ratios, and the loss."""

from __future__ import annotations

from pathlib import Path

from megascale_omni.clipping.record import ClipRecord
from megascale_omni.pictures.canvas import new_figure, save

# Four blocks of layers with experts, embedding and the rest are ten modules: each has a colour of its own.
_COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"),
    *("#882255", "#b8ad00", "#5b3a9d", "#7a4a1e"),
)


def draw_clipping(record: ClipRecord, path: str | Path) -> None:
    """Four panels over steps: norms (lines) with thresholds (dashed), GVC, clip ratios, loss with alpha."""
    figure = new_figure(12, 8)
    (norms, spread), (ratios, losses) = figure.subplots(2, 2, sharex=True)
    steps = record.steps
    for number, module in enumerate(record.modules):
        color = _COLORS[number % len(_COLORS)]
        width = 1.2 if number < len(_COLORS) else 0.7
        norms.plot(steps, module.norms, color=color, linewidth=width, label=module.name)
        norms.plot(steps, module.thresholds, color=color, linewidth=width, linestyle="--", alpha=0.7)
        spread.plot(steps, module.gvcs, color=color, linewidth=width)
        ratios.plot(steps, module.ratios, color=color, linewidth=width)
    if any(norm > 0 for module in record.modules for norm in module.norms):
        norms.set_yscale("log")
    norms.set(title="gradient norm before clipping; dashed: threshold", ylabel="norm")
    norms.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.06))
    spread.set(title="coefficient of variation (GVC)", ylabel="std(g) / mean(|g|)")
    ratios.set(title="clip ratio: what gradients were multiplied by", ylabel="ratio", xlabel="step", ylim=(0, 1.05))
    losses.plot(steps, record.losses, color="#000000", linewidth=1.2, label="loss")
    losses.set(title="loss, and alpha", ylabel="loss", xlabel="step")
    alpha = losses.twinx()
    alpha.plot(steps, record.alphas, color="#d55e00", linewidth=1.2, drawstyle="steps-post", label="alpha")
    alpha.set(ylabel="alpha", ylim=(-0.05, 1.05))
    lines = [*losses.get_lines(), *alpha.get_lines()]
    losses.legend(lines, [str(line.get_label()) for line in lines], fontsize=8, loc="center right")
    for axes in (norms, spread, ratios, losses):
        axes.grid(alpha=0.3)
        for step, _ in record.non_finite:
            axes.axvline(step, color="#cc0000", linewidth=0.8, linestyle=":")
    save(figure, path)

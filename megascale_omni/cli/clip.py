"""``megascale clip``: how gradients were clipped in a run, module by module."""

from __future__ import annotations

import argparse
import math
import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megascale_omni.clipping.record import ClipRecord

NAME = "clip"
HELP = "show gradient norms, thresholds and clipping of each module of a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and the picture."""
    parser.add_argument("run_file", metavar="RUN", help="file of --metrics-jsonl, or a folder with no other .jsonl")
    parser.add_argument("--png", metavar="FILE", help="draw norms, thresholds, GVC and clip ratios over time")


def run(args: argparse.Namespace) -> int:
    """Prints a table a module; returns 0."""
    from megascale_omni.clipping.record import read_clip_record

    record = read_clip_record(args.run_file)
    print("\n".join(_lines(record)))
    if args.png:
        from megascale_omni.pictures.clipping import draw_clipping

        draw_clipping(record, args.png)
        print(f"picture: {args.png}")
    return 0


def _lines(record: ClipRecord) -> list[str]:
    known = [alpha for alpha in record.alphas if not math.isnan(alpha)]  # a step that is left out has none
    alpha = f"{known[-1]:.4f}" if known else "off"
    lines = [
        f"steps {record.steps[0]} to {record.steps[-1]}, alpha {alpha}, {record.skipped_steps} steps left out",
        f"{'module':<16}{'norm':>11}{'log10 spread':>14}{'GVC':>8}{'threshold':>11}{'clip ratio':>12}{'clipped':>9}",
    ]
    for module in record.modules:
        numbers = [_median(v) for v in (module.norms, module.gvcs, module.thresholds, module.ratios)]
        norm, gvc, threshold, ratio = numbers
        lines.append(
            f"{module.name:<16}{norm:>11.4g}{module.log_spread:>14.3f}{gvc:>8.3f}{threshold:>11.4g}{ratio:>12.4f}"
            f"{module.clipped_share:>9.0%}"
        )
    return [*lines, *(f"step {step} left out: {where}" for step, where in record.non_finite)]


def _median(values: tuple[float, ...]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan

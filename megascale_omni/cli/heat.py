"""``megascale heat``: which experts a run used, over time."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megascale_omni.heat.report import RankReport

MOST_NAMED = 16

NAME = "heat"
HELP = "show which experts of a run are hot, warm, cold or frozen"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and the picture."""
    parser.add_argument("folder", metavar="RUN", help="folder given to --megascale-report")
    parser.add_argument("--png", metavar="FILE", help="draw experts over time")


def _told(experts: Sequence[int], state: str) -> str:
    """How many are in a state, and which of the rank's own (from 0), where that is news and a short list."""
    if state == "warm" or not 0 < len(experts) <= MOST_NAMED:
        return f"{len(experts)} {state}"
    return f"{len(experts)} {state} ({' '.join(map(str, experts))})"


def _work(milliseconds: Sequence[int] | None) -> str:
    """How long a layer's experts worked, and who did most of it."""
    if not milliseconds or not sum(milliseconds):
        return ""
    most = max(range(len(milliseconds)), key=lambda expert: milliseconds[expert])
    share = 100 * milliseconds[most] / sum(milliseconds)
    return f"; {sum(milliseconds) / 1e3:.1f} s of work, {share:.0f} % by expert {most}"


def _works(report: RankReport) -> list[Sequence[int] | None]:
    return report.heat[-1].get("work_milliseconds") or [None] * len(report.modules)


def run(args: argparse.Namespace) -> int:
    """Prints the last states, module by module; returns 0."""
    from megascale_omni.heat.report import of_newest_ranks, read_report
    from megascale_omni.heat.states import Heat
    from megascale_omni.pictures.heat import draw_heat, heat_grid

    reports = of_newest_ranks(read_report(args.folder))
    grid, steps, begins = heat_grid(reports)
    ends = [row for row, _ in begins[1:]] + [len(grid)]
    print(f"after step {steps[-1]}:")
    works = [work for report in reports for work in _works(report)]
    for (row, name), end, work in zip(begins, ends, works, strict=True):
        last = grid[row:end, -1]
        told = ", ".join(_told((last == state).nonzero()[0].tolist(), state.name.lower()) for state in reversed(Heat))
        print(f"  {name}: {told}{_work(work)}")
    if args.png:
        draw_heat(reports, args.png)
        print(f"picture: {args.png}")
    return 0

"""``megascale heat``: which experts a run used, over time."""

from __future__ import annotations

import argparse

NAME = "heat"
HELP = "show which experts of a run are hot, warm, cold or frozen"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and the picture."""
    parser.add_argument("folder", metavar="RUN", help="folder given to --megascale-report")
    parser.add_argument("--png", metavar="FILE", help="draw experts over time")


def run(args: argparse.Namespace) -> int:
    """Prints the last states a module; returns 0."""
    from megascale_omni.heat.report import read_report
    from megascale_omni.heat.states import Heat
    from megascale_omni.pictures.heat import draw_heat, heat_grid

    reports = read_report(args.folder)
    grid, steps, begins = heat_grid(reports)
    ends = [row for row, _ in begins[1:]] + [len(grid)]
    print(f"after step {steps[-1]}:")
    for (row, name), end in zip(begins, ends, strict=True):
        last = grid[row:end, -1]
        counts = ", ".join(f"{int((last == state).sum())} {state.name.lower()}" for state in reversed(Heat))
        print(f"  {name}: {counts}")
    if args.png:
        draw_heat(reports, args.png)
        print(f"picture: {args.png}")
    return 0

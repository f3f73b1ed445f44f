"""``megascale residency``: where a run's pages were, over time."""

from __future__ import annotations

import argparse

NAME = "residency"
HELP = "show where the pages of a run were, what moved, and what was waited for"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and the picture."""
    parser.add_argument("folder", metavar="RUN", help="folder given to --megascale-report")
    parser.add_argument("--png", metavar="FILE", help="draw bytes by tier, moves and stalls over time")


def run(args: argparse.Namespace) -> int:
    """Prints totals; returns 0."""
    from megascale_omni.heat.report import of_newest_ranks, read_report
    from megascale_omni.pictures.residency import TIER_LABELS, budgets_of, draw_residency, residency_series

    reports = read_report(args.folder)
    series = residency_series(reports)
    count, ranks = len(series["step"]), len(of_newest_ranks(reports))
    print(f"{count} step{'s' * (count > 1)} on {ranks} rank{'s' * (ranks > 1)}")
    for step, limit in budgets_of(series):
        print(f"  device budget from step {step:.0f} on: {limit / 2**20:,.1f} MiB")
    for tier, label in TIER_LABELS.items():
        print(f"  {label}: {series[tier][-1] / 2**20:,.1f} MiB at the end, {series[tier].max() / 2**20:,.1f} at most")
    print(f"  page faults: {int(series['faults'].sum())}")
    print(f"  loaded {series['loaded'].sum() / 2**20:,.1f} MiB, written {series['written'].sum() / 2**20:,.1f} MiB")
    print(f"  waiting for pages: {series['stall_seconds'].sum():.2f} s of {series['seconds'].sum():.2f} s")
    if args.png:
        draw_residency(reports, args.png)
        print(f"picture: {args.png}")
    return 0

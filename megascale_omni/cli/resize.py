"""``megascale resize``: another budget for the pages of a run that is under way."""

from __future__ import annotations

import argparse

from megascale_omni.cli.requests import add_run, ask_and_wait

NAME = "resize"
HELP = "give the pages of a run that is under way more or less memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and the budgets."""
    add_run(parser)
    parser.add_argument("--device-budget", metavar="SIZE", help="device memory for pages: 8GiB, 25%% (of all pages)")
    parser.add_argument("--host-budget", metavar="SIZE", help="host memory behind it")


def run(args: argparse.Namespace) -> int:
    """Asks the run. ValueError where neither budget is given, or one is none."""
    from megascale_omni.config import parse_budget

    budgets = {"device": args.device_budget, "host": args.host_budget}
    if not any(budgets.values()):
        raise ValueError("give --device-budget or --host-budget, or both")
    for which, text in budgets.items():
        if text is not None:
            parse_budget(text, key=f"--{which}-budget")
    return ask_and_wait(args, what="resize", **budgets)

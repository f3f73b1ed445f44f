"""``megascale compact``: compaction of a run that is under way."""

from __future__ import annotations

import argparse

from megascale_omni.cli.requests import add_run, ask_and_wait

NAME = "compact"
HELP = "let a run that is under way return the memory that holds no page"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run."""
    add_run(parser)


def run(args: argparse.Namespace) -> int:
    """Asks the run."""
    return ask_and_wait(args, what="compact")

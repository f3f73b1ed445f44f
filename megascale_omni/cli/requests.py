"""What ``megascale resize`` and ``megascale compact`` have in common: they ask a run, and wait for its answer."""

from __future__ import annotations

import argparse


def add_run(parser: argparse.ArgumentParser) -> None:
    """The run, and how long to wait for it."""
    parser.add_argument("folder", metavar="RUN", help="folder given to --megascale-report")
    parser.add_argument(
        "--wait", type=float, default=300.0, metavar="SECONDS", help="for the step at hand to end (default 300)"
    )


def ask_and_wait(args: argparse.Namespace, **wanted: object) -> int:
    """Asks, and prints what every rank answered; returns 0, or 1 where one refused.

    Raises:
        ValueError: no report of a run there, or a rank did not answer in time.
    """
    from megascale_omni.heat.report import read_report
    from megascale_omni.heat.requests import ask, wait_for_answers

    first = read_report(args.folder)[0]
    if first.ended:
        raise ValueError(f"the run that wrote {args.folder} has ended")
    ranks = first.world or 1
    number = ask(args.folder, **wanted)
    answers = wait_for_answers(args.folder, number, ranks=ranks, seconds=args.wait)
    for rank, answer in sorted(answers.items()):
        said = answer.get("done") or f"refused: {answer['error']}"
        print(f"rank {rank}, after step {answer['step']}: {said}")
    if len(answers) < ranks:
        raise ValueError(
            f"{len(answers)} of {ranks} ranks of {args.folder} have answered within {args.wait:g} s: was the run "
            "killed, or do its steps take longer (--wait)?"
        )
    return int(any("error" in answer for answer in answers.values()))

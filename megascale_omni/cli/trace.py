"""``megascale trace``: what a recorded run would have moved under other policies and budgets."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megascale_omni.paging.minimum import Moved
    from megascale_omni.paging.trace import Trace

NAME = "trace"
HELP = "look at a trace of page uses, or replay it under residency policies"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``show FILE`` and ``replay FILE --policy ... --budget ...``."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="say what is in a trace")
    show.add_argument("file", metavar="FILE")
    show.set_defaults(action=_show)
    replay = actions.add_parser("replay", help="count what would have been moved")
    replay.add_argument("file", metavar="FILE")
    replay.add_argument("--policy", default="lru,ours,min", metavar="NAMES", help="of lru, ours, min (default: all)")
    replay.add_argument("--budget", default="25%", metavar="SIZES", help="sizes or percentages, e.g. 10%%,25%%,2GiB")
    replay.add_argument("--no-prefetch", action="store_true", help="`ours` fetches nothing early")
    replay.add_argument(
        "--together", action="store_true", help="dirty pages of `ours` begin to leave several at once, as in a run"
    )
    replay.add_argument("--json", metavar="FILE", help="write the result there, too")
    replay.set_defaults(action=_replay)


def run(args: argparse.Namespace) -> int:
    """Does what the action says; returns 0."""
    action: object = args.action
    assert callable(action)
    action(args)
    return 0


def _read(path: str) -> Trace:
    from megascale_omni.paging.trace import read_trace

    trace = read_trace(path)
    if not trace.whole:
        print(f"{path}: the run ended while it was written; what follows is of the part before that")
    return trace


def _show(args: argparse.Namespace) -> None:
    from collections import Counter

    trace = _read(args.file)
    counts = Counter(event.op.name.lower() for event in trace)
    print(f"{len(trace.model.modules)} modules, {trace.model.total_bytes / 2**20:.1f} MiB of pages in all planes")
    for module in trace.model.modules:
        planes = ", ".join(f"{name} {nbytes / 2**10:.0f} KiB" for name, nbytes in module.slot_bytes.items())
        print(f"  {module.path}: {module.experts} experts of {module.slices} pages; a page: {planes}")
    print(", ".join(f"{count} x {name}" for name, count in counts.most_common()))


def _replay(args: argparse.Namespace) -> None:
    from megascale_omni.config import parse_budget
    from megascale_omni.paging.replay import check_policy, replay

    policies = [check_policy(name) for name in _listed(args.policy)]
    budgets = {text: parse_budget(text, key="--budget") for text in _listed(args.budget)}
    if args.json and (Path(args.json).is_dir() or not Path(args.json).absolute().parent.is_dir()):
        raise ValueError(f"--json={args.json} cannot be written: give a file in a folder that is there")
    trace = _read(args.file)
    if not len(trace.numbers):
        raise ValueError(f"{args.file} holds no use of a page: the run ended before its first step")
    found: list[tuple[str, Moved]] = []
    for text, budget in budgets.items():
        for policy in policies:
            moved = replay(
                trace,
                policy=policy,
                budget=budget,
                prefetch=not args.no_prefetch,
                together=args.together and policy == "ours",
            )
            found.append((text, moved))
    _print(found)
    if args.json:
        content = {"trace": args.file, "replays": [{"budget": text, **moved.as_json()} for text, moved in found]}
        try:
            Path(args.json).write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise ValueError(f"--json={args.json} cannot be written: {error.strerror}; give another file") from error


def _listed(text: str) -> list[str]:
    """The words between commas, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",")))


def _print(found: list[tuple[str, Moved]]) -> None:
    names = ("budget", "policy", "page-ins", "MiB in", "demanded", "prefetched", "of min")
    print(" ".join(f"{name:>10}" for name in names))
    for text, moved in found:
        least = next((m.bytes_in for t, m in found if t == text and m.policy == "min"), None)
        ratio = f"{moved.bytes_in / least:.2f}x" if least else ""
        mib = [f"{n / 2**20:.1f}" for n in (moved.bytes_in, moved.demanded_bytes, moved.prefetched_bytes)]
        print(" ".join(f"{cell!s:>10}" for cell in (text, moved.policy, moved.page_ins, *mib, ratio)))

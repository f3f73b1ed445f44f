"""Prove, step by step and over whole runs, that --megascale computes what stock Megatron-Core computes.

    python scripts/prove_exactness.py --layout single,ep2
    python scripts/prove_exactness.py --layout all --json out/exactness.json

At each of 100 steps stock and MegaScale begin with the same weights, moments, random numbers and batch; routing, loss,
gradient norm, every gradient, every moment and every update are compared (scripts/exactness/deviations.py has the
bounds). Beside them runs the control, stock with each expert computed in two halves: what rounding alone does. Then one
expert's gradient is multiplied by 1.001 in MegaScale: if that is not seen, the proof is worth nothing. Free runs begin
equal and are left alone for 100 steps; the loss must fall by 1.5 nats and stay within 1e-5 of stock's. In bf16 the
deviations are held against twice the control's.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from scripts.exactness.layouts import LAYOUTS, describe, select
from scripts.exactness.report import print_verdicts
from scripts.exactness.runner import PARTS, prove
from scripts.measuring.corpus import standard_library_corpus
from scripts.measuring.environment import measured_environment
from scripts.measuring.files import check_writable, write_json
from scripts.measuring.processes import WorkersFailed


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where a bound is not kept or a rank failed."""
    args = _parser().parse_args(argv)
    if args.list:
        print(describe(LAYOUTS))
        return 0
    try:
        layouts = select(args.layout)
        check_writable(args.json)
        with ExitStack() as stack:
            data_path = args.data_path or standard_library_corpus(
                Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megascale-corpus-")))
            )
            verdicts = [
                prove(
                    layout,
                    data_path=data_path,
                    steps=args.steps,
                    parts=args.parts.split(","),
                    megascale=not args.without_megascale,
                )
                for layout in layouts
            ]
    except KeyboardInterrupt:
        print("prove_exactness.py: interrupted; nothing was written", file=sys.stderr)
        return 130
    except (OSError, ValueError, WorkersFailed) as error:
        print(f"prove_exactness.py: {error}", file=sys.stderr)
        return 1
    print_verdicts(verdicts)
    passes = all(verdict.passes for verdict in verdicts)
    if args.json:
        content = {
            "environment": measured_environment(threads=1),
            "layouts": [verdict.as_json() for verdict in verdicts],
            "passes": passes,
        }
        write_json(args.json, content)
    return 0 if passes else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layout", default="all", help="NAME[,NAME] or all (default); see --list")
    parser.add_argument("--list", action="store_true", help="list the layouts and end")
    parser.add_argument("--steps", type=int, default=100, help="steps of the proof and of the free run (default 100)")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)} (default: all)")
    parser.add_argument("--without-megascale", action="store_true", help="only stock against its control")
    parser.add_argument("--data-path", type=Path, help="text file or folder (default: the standard library's sources)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser

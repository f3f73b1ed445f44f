"""Measure every row of a topic afresh, and say which are met.

    python scripts/measure.py house --json out/house.json
    python scripts/measure.py house --row H4 --row H6-coarse
    python scripts/measure.py megatron-lm --megatron-lm CHECKOUT

Standard output is `{"topic", "environment", "rows": [{"id", "what", "value", "unit", "at_least" | "at_most", "aim",
"met", "seconds"}]}`, progress goes to standard error. Of rows that share a measurement the first has its seconds. A row
that could not be measured has value null and an "error". The exit status is 1 where a row is not met. This is a
benchmark: run it on a machine that does nothing else.
"""

import argparse
import importlib
import json
import pkgutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import scripts.measurements
from scripts.measurements.rows import Context, Row, measure, select
from scripts.measuring.corpus import standard_library_corpus
from scripts.measuring.environment import measured_environment
from scripts.measuring.files import finite, write_json

_NOT_TOPICS = {"main", "rows"}
_TWO_WORDS = {"megatron-lm": "megatron_lm"}


def topics() -> list[str]:
    """Modules of this package that define `ROWS`, by name; a dash where the module's name has an underscore."""
    names = [module.name for module in pkgutil.iter_modules(scripts.measurements.__path__)]
    return [name for name in names if name not in _NOT_TOPICS and "_" not in name] + [*_TWO_WORDS]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("topic", choices=topics())
    parser.add_argument("--row", action="append", default=[], metavar="ID", help="only this row, or those below it")
    parser.add_argument("--list", action="store_true", help="list the rows and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there, too")
    parser.add_argument("--megatron-lm", type=Path, metavar="PATH", help="a checkout of Megatron-LM, for its topic")
    args = parser.parse_args(argv)
    module = _TWO_WORDS.get(args.topic, args.topic)
    all_rows: tuple[Row, ...] = importlib.import_module(f"scripts.measurements.{module}").ROWS
    try:
        rows = select(all_rows, args.row)
    except ValueError as error:
        print(f"measure.py: {error}", file=sys.stderr)
        return 2
    if args.list:
        for row in rows:
            print(f"{row.id}: {row.what} ({row.kind.replace('_', ' ')} {row.bound:g} {row.unit})")
        return 0
    environment = measured_environment()
    with tempfile.TemporaryDirectory(prefix="megascale-corpus-") as folder:
        found = measure(rows, Context(standard_library_corpus(Path(folder)), checkout=args.megatron_lm))
    content = {
        "topic": args.topic,
        "environment": environment,
        "rows": [measured.as_json() for measured in found],
    }
    print(json.dumps(finite(content), indent=1))
    if args.json:
        write_json(args.json, content)
    return 0 if all(measured.met for measured in found) else 1

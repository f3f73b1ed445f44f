"""Measure every row of a topic afresh, and say which are met.

    python scripts/measure.py house --json out/house.json
    python scripts/measure.py house --row H4 --row H6-coarse
    python scripts/measure.py megatron-lm --megatron-lm CHECKOUT --json out/lm.json --resume

Standard output is `{"topic", "environment", "rows": [{"id", "what", "value", "unit", "at_least" | "at_most", "aim",
"met", "seconds"}]}`, with "megatron_lm" (release and commit) where a checkout is given; progress goes to stderr.
Of rows that share a measurement the first has its seconds. A row that could not be measured has value null and an
"error". The file is written after every row; `--resume` keeps the rows that have a value in it, and those that are not
asked for. The exit status is 1 where a row is not met. This is a benchmark: run it on a machine that does nothing else.
"""

import argparse
import importlib
import json
import pkgutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import scripts.measurements
from scripts.measurements.rows import Context, Measured, Row, measure, select
from scripts.measuring.corpus import standard_library_corpus
from scripts.measuring.environment import measured_environment
from scripts.measuring.files import check_writable, finite, write_json
from scripts.megatron_lm_runs.running import revision

Content = dict[str, Any]

_NOT_TOPICS = {"main", "rows"}
_TWO_WORDS = {"megatron-lm": "megatron_lm"}


_SAME = ("python", "platform", "packages", "cpu", "gpus")
"""Of the environment: what all rows of a file have in common."""


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
    parser.add_argument("--resume", action="store_true", help="keep the rows that FILE has a value of already")
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
    head: Content = {"topic": args.topic, "environment": measured_environment()}
    try:
        check_writable(args.json)
        if args.megatron_lm is not None:
            head["megatron_lm"] = revision(args.megatron_lm)
        head, entries = _kept(args.json, head) if args.resume else (head, {})
    except ValueError as error:
        print(f"measure.py: {error}", file=sys.stderr)
        return 2
    order = [row.id for row in all_rows]

    def content() -> Content:
        return {**head, "rows": [entries[name] for name in order if name in entries]}

    def report(measured: Measured) -> None:
        entries[measured.row.id] = measured.as_json()
        if args.json:
            write_json(args.json, content())

    wanted = [row for row in rows if entries.get(row.id, {}).get("value") is None]
    with tempfile.TemporaryDirectory(prefix="megascale-corpus-") as folder:
        measure(wanted, Context(standard_library_corpus(Path(folder)), checkout=args.megatron_lm), report=report)
    print(json.dumps(finite(content()), indent=1))
    return 0 if all(entries[row.id]["met"] for row in rows) else 1


def _kept(path: Path | None, head: Content) -> tuple[Content, dict[str, Content]]:
    """What a file begins with and its rows by id; ``head`` and none where there is no file yet.

    Raises:
        ValueError: no file is named, or it is of another topic, checkout, machine or other packages.
    """
    if path is None:
        raise ValueError("--resume goes on with a file: add --json FILE")
    if not path.exists():
        return head, {}
    found = json.loads(path.read_text(encoding="utf-8"))
    for name in ("topic", "megatron_lm"):
        if found.get(name) != head.get(name):
            raise ValueError(f"{path} has {name} {found.get(name)}, this run {head.get(name)}: name another file")
    there, here = found["environment"], finite(head["environment"])
    assert isinstance(here, dict)
    differing = [name for name in _SAME if there.get(name) != here.get(name)]
    if differing:
        raise ValueError(f"{path} was measured elsewhere (it differs in {', '.join(differing)}): name another file")
    return {name: value for name, value in found.items() if name != "rows"}, {row["id"]: row for row in found["rows"]}

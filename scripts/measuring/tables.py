"""Tables: lines and colours on a terminal, plain columns elsewhere."""

import math
import os
import re
import sys
from collections.abc import Sequence
from typing import TextIO

from scripts.measuring.units import plain_number

_QUANTITY = re.compile(r"-?[\d.,]+(e[-+]?\d+)?( \w+)?$")
"""A number with a unit or without."""

Cell = str | float | int | bool | None


def cell_text(value: Cell) -> str:
    """What a cell shows: numbers short, truth as yes or no, nothing as a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return value if isinstance(value, str) else plain_number(value)


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, title: str | None = None) -> str:
    """A table in plain text; columns of numbers are right-aligned."""
    texts = [[cell_text(value) for value in row] for row in rows]
    widths = [max([len(name), *(len(row[i]) for row in texts)]) for i, name in enumerate(columns)]
    right = [_is_numeric([row[i] for row in rows]) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        placed = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True))
        return "  ".join(placed).rstrip()

    lines = [line(columns), "  ".join("-" * width for width in widths), *map(line, texts)]
    return "\n".join([title, *lines] if title else lines)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, title: str | None = None, file: TextIO | None = None
) -> None:
    """Print a table as the reader can see it best."""
    file = file or sys.stdout
    if not is_terminal(file):
        print(plain_table(columns, rows, title=title), file=file, flush=True)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if _is_numeric([row[index] for row in rows]) else "left")
    for row in rows:
        table.add_row(*(_styled(value) for value in row))
    Console(file=file).print(table)


def is_terminal(file: TextIO) -> bool:
    """Whether a person looks at a terminal that can draw."""
    return file.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _styled(value: Cell) -> str:
    from rich.markup import escape

    text = escape(cell_text(value))
    if value is True:
        return f"[green]{text}[/]"
    return f"[bold red]{text}[/]" if value is False else text


def _is_numeric(values: Sequence[Cell]) -> bool:
    numbers = [v for v in values if v is not None]
    return bool(numbers) and all(
        _QUANTITY.match(v) is not None if isinstance(v, str) else not isinstance(v, bool) and not math.isnan(v)
        for v in numbers
    )

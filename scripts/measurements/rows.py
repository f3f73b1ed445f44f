"""Rows of a measurement: what is measured, what it must reach, and what it did."""

import math
import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from scripts.measuring.progress import say
from scripts.measuring.units import plain_number, plain_seconds

Result = TypeVar("Result")
Bound = Literal["at_least", "at_most"]


class NotMeasurableError(RuntimeError):
    """A row that this machine cannot measure; the message has what it takes."""


@dataclass(frozen=True)
class _Failure:
    error: Exception


@dataclass
class Context:
    """What the measurements of one run share. Everything is measured afresh in each run."""

    data_path: Path
    """Text to train on."""
    checkout: Path | None = None
    """Of Megatron-LM, where one was given."""
    _made: dict[Hashable, object] = field(default_factory=dict)

    def megatron_lm(self) -> Path:
        """The checkout of Megatron-LM.

        Raises:
            ValueError: none was given, or it is none.
        """
        if self.checkout is None:
            raise ValueError("this needs a checkout of Megatron-LM: add --megatron-lm PATH")
        from scripts.megatron_lm_runs.running import checkout

        return checkout(self.checkout)

    def once(self, key: Hashable, measure: Callable[[], Result]) -> Result:
        """The result of a measurement that several rows read, made when the first one asks; its failure, likewise."""
        if key not in self._made:
            try:
                self._made[key] = measure()
            except Exception as error:
                self._made[key] = _Failure(error)
        made = self._made[key]
        if isinstance(made, _Failure):
            raise made.error
        return made  # type: ignore[return-value]


@dataclass(frozen=True)
class Row:
    """One number and its bound. `aim` is where the bound should be one day; it decides nothing."""

    id: str
    what: str
    unit: str
    kind: Bound
    bound: float
    measure: Callable[[Context], float]
    aim: float | None = None

    def selected_by(self, wanted: str) -> bool:
        """Whether `--row wanted` means this one: its id, or the beginning of it up to a dash."""
        return self.id == wanted or self.id.startswith(f"{wanted}-")


@dataclass(frozen=True)
class Measured:
    """A row with its value; without one where measuring failed."""

    row: Row
    value: float | None
    seconds: float
    error: str | None = None

    @property
    def met(self) -> bool:
        """Whether the bound is kept; what is no number keeps none."""
        return self.value is not None and keeps(self.value, self.row.kind, self.row.bound)

    def as_json(self) -> dict[str, object]:
        """The row's entry in the file."""
        entry: dict[str, object] = {
            "id": self.row.id,
            "what": self.row.what,
            "value": self.value,
            "unit": self.row.unit,
            self.row.kind: self.row.bound,
            "aim": self.row.aim,
            "met": self.met,
            "seconds": round(self.seconds, 2),
        }
        return entry if self.error is None else {**entry, "error": self.error}


def keeps(value: float, kind: Bound, bound: float) -> bool:
    """`value >= bound` or `value <= bound`; false for what is not a number."""
    if math.isnan(value):
        return False
    return value >= bound if kind == "at_least" else value <= bound


def select(rows: Sequence[Row], wanted: Sequence[str]) -> list[Row]:
    """The rows that `--row` names; all of them where it names none. Raises ValueError for a name without rows."""
    for name in wanted:
        if not any(row.selected_by(name) for row in rows):
            raise ValueError(f"no row {name!r}; there are {', '.join(row.id for row in rows)}")
    return [row for row in rows if not wanted or any(row.selected_by(name) for name in wanted)]


def measure(
    rows: Sequence[Row], context: Context, *, report: Callable[[Measured], None] = lambda measured: None
) -> list[Measured]:
    """Measure row after row; one that fails is reported and does not stop the others.

    ``report`` is told of each as soon as it is measured.
    """
    found: list[Measured] = []
    for index, row in enumerate(rows):
        say(f"[{index + 1}/{len(rows)}] {row.id}: {row.what}")
        start = time.monotonic()
        try:
            value, error = float(row.measure(context)), None
        except NotMeasurableError as problem:  # as expected: no traceback
            value, error = None, f"not measurable: {problem}"
            say(f"    {error}")
        except Exception as problem:
            value, error = None, f"{type(problem).__name__}: {problem}"
            say("".join(traceback.format_exception(problem)))
        found.append(Measured(row, value, time.monotonic() - start, error))
        report(found[-1])
        say(f"[{index + 1}/{len(rows)}] {_line(found[-1])}")
    return found


def _line(measured: Measured) -> str:
    row = measured.row
    relation = ">=" if row.kind == "at_least" else "<="
    value = "failed" if measured.value is None else f"{plain_number(measured.value)} {row.unit}"
    verdict = "met" if measured.met else "NOT MET"
    return f"{row.id}: {value} ({relation} {plain_number(row.bound)}): {verdict}, {plain_seconds(measured.seconds)}"

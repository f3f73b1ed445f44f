"""Progress of long work: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from scripts.measuring.tables import is_terminal
from scripts.measuring.units import plain_seconds

_LINE_EVERY_SECONDS = 10.0


class Progress:
    """`total` units of work named `what`; written to standard error, so that standard output stays for results."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._start = self._last_line = time.monotonic()
        self._bar = None
        if is_terminal(sys.stderr):
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(what, total=total)

    def advance(self, units: int = 1, *, note: str = "") -> None:
        """Some units are done; `note` says what a reader may want to know now."""
        self._done += units
        description = f"{self._what}{f' | {note}' if note else ''}"
        if self._bar is not None:
            self._bar.update(self._task, advance=units, description=description)
            return
        now = time.monotonic()
        if self._done >= self._total or now - self._last_line >= _LINE_EVERY_SECONDS:
            self._last_line = now
            elapsed = now - self._start
            left = elapsed / self._done * (self._total - self._done) if self._done else None
            rest = f", about {plain_seconds(left)} left" if left else ""
            say(f"{description} | {self._done}/{self._total} | {plain_seconds(elapsed)}{rest}")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def say(text: str) -> None:
    """A line for the person who waits."""
    print(text, file=sys.stderr, flush=True)

"""What a run writes down: JSON lines, TensorBoard, and what a person sees while it runs. Rank 0 only."""

import json
import math
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

Record = Mapping[str, object]


class Sink(Protocol):
    """Takes the records of a run one by one; each has an `event`."""

    def write(self, record: Record) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """Finish; nothing is written after it."""
        ...


class JsonLines:
    """One JSON object a line, in the file as soon as it is written. Non-finite numbers become strings ("nan").

    ``append`` goes on after the last whole line: a run that was killed while it wrote leaves a part of one.
    """

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if append and Path(path).is_file():  # not a device
            with Path(path).open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
        self._file = Path(path).open("a" if append else "w", encoding="utf-8")  # noqa: SIM115

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(_finite(dict(record))) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """Every number of the step and validation records as a scalar over iterations, those of dicts by their path."""

    def __init__(self, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder)

    def write(self, record: Record) -> None:
        if record["event"] not in ("step", "validation"):
            return
        for name, value in _numbers(record):
            if name != "iteration":
                self._writer.add_scalar(f"{record['event']}/{name}", value, record["iteration"])

    def close(self) -> None:
        self._writer.close()


def _numbers(values: Record, prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            yield prefix + name, value


class PlainLines:
    """A line every `interval` steps, for logs."""

    def __init__(self, *, interval: int, last: int) -> None:
        self._interval, self._last = interval, last

    def write(self, record: Record) -> None:
        if record["event"] == "step":
            iteration = record["iteration"]
            assert isinstance(iteration, int)
            if iteration % self._interval and iteration != self._last:
                return
        print(describe(record, self._last), flush=True)

    def close(self) -> None:
        pass


class ProgressBar:
    """A bar with loss and speed on a terminal; other records are lines above it."""

    def __init__(self, *, first: int, last: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._last = last
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]} | {task.fields[speed]} tokens/s"),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("train", total=last, completed=first, loss="-", speed="-")
        self._progress.start()

    def write(self, record: Record) -> None:
        if record["event"] != "step":
            self._progress.console.print(describe(record, self._last), markup=False, highlight=False)
            return
        self._progress.update(
            self._task,
            completed=_number(record, "iteration"),
            loss=f"{_number(record, 'loss'):.4f}",
            speed=f"{_number(record, 'tokens_per_second'):,.0f}",
        )

    def close(self) -> None:
        self._progress.stop()


def _number(record: Record, name: str) -> float:
    value = record[name]
    assert isinstance(value, (int, float))
    return float(value)


_STARTS_WITH = ("megascale", "device", "world", "params", "tokens_per_step", "paging", "iteration", "setup_seconds")
"""What a person reads of the start record; the JSON lines have all of it."""


def describe(record: Record, last: int) -> str:
    """Return the line that a person reads for a record."""
    event = record["event"]
    if event == "step":
        parts = [f"iteration {record['iteration']}/{last}", f"loss {_number(record, 'loss'):.6f}"]
        parts += [f"{name} {record[name]:.4g}" for name in ("grad_norm", "lr") if record.get(name) is not None]
        parts += [f"{_number(record, 'step_seconds'):.3f} s", f"{_number(record, 'tokens_per_second'):,.0f} tokens/s"]
        return " | ".join(parts) + (" | skipped" if record.get("skipped") else "")
    told: dict[str, Any] = {
        name: value for name, value in record.items() if name != "event" and value not in (None, [])
    }
    if event == "start":
        told = {name: told[name] for name in _STARTS_WITH if name in told}
    if isinstance(told.get("paging"), Mapping):
        told["paging"] = _paging(told["paging"])
    return " | ".join([str(event), *(f"{name} {_readable(name, value)}" for name, value in told.items())])


def _paging(values: Mapping[str, Any]) -> str:
    """What is in pages (at the start), or what pages did (at the end)."""
    from megascale_omni.experts.overview import Overview, in_words

    return str(Overview.from_record(values)) if "state_bytes" in values else in_words(values)


def _readable(name: str, value: object) -> str:
    """A value as a person reads it: bytes in MiB, numbers with few digits, groups of values in brackets."""
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{key} {_readable(key, part)}" for key, part in value.items()) + ")"
    if isinstance(value, list):
        return " + ".join(map(str, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if "bytes" in name:
        return f"{value / 2**20:,.1f} MiB"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


class Metrics:
    """Hands each record to every sink; on ranks other than 0 there are none."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    def write(self, **record: object) -> None:
        """Write one record."""
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Close every sink."""
        while self._sinks:
            self._sinks.pop().close()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def wants_progress_bar() -> bool:
    """Whether a person is looking: standard output is a terminal that can redraw a line."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def resident_bytes() -> int:
    """Return this process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def peak_resident_bytes() -> int:
    """Return the most resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

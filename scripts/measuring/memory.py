"""Memory of running processes, as the kernel counts it (Linux only)."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

KIB = 1024


def _status_kib(process: int | str, field: str) -> int:
    path = Path(f"/proc/{process}/status")
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    raise RuntimeError(f"{path} has no {field}: the process {process} has ended, or this system does not count it")


def resident_bytes(process: int | str = "self") -> int:
    """Resident memory of a process. Raises OSError or RuntimeError when it has ended."""
    return _status_kib(process, "VmRSS") * KIB


def peak_resident_bytes(process: int | str = "self") -> int:
    """The most resident memory that a process has had since it was started.

    Of the process itself, unlike `ru_maxrss`, which a child inherits from a larger parent.
    """
    return _status_kib(process, "VmHWM") * KIB


def private_bytes(process: int | str = "self") -> int:
    """Private writable memory that a process has asked for, touched or not: what RLIMIT_DATA limits."""
    return _status_kib(process, "VmData") * KIB


@dataclass(frozen=True)
class MemorySample:
    """Resident memory of a group of processes at a moment."""

    seconds: float
    """Since the first sample."""
    resident_bytes: int
    """The sum over the group."""


class MemorySampler:
    """Samples resident memory of processes in a thread of this process, between `resume` and `pause`.

    The clock of the samples stands still while it is paused, so that runs that take turns get curves of their own time.
    """

    def __init__(self, processes: Sequence[int], *, interval_seconds: float = 0.1) -> None:
        self._processes = tuple(processes)
        self._interval = interval_seconds
        self._samples: list[MemorySample] = []
        self._elapsed = 0.0
        self._resumed_at: float | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def resume(self) -> None:
        """Start sampling, or go on."""
        if self._thread is not None:
            raise RuntimeError("the sampler is running already")
        self._stop.clear()
        self._resumed_at = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Take one last sample and stop; idempotent."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        self._take()
        self._elapsed, self._resumed_at = self._now(), None

    @property
    def samples(self) -> tuple[MemorySample, ...]:
        """Samples so far, ascending in time."""
        return tuple(self._samples)

    @property
    def largest_bytes(self) -> int:
        """The largest sample; 0 before the first."""
        return max((sample.resident_bytes for sample in self._samples), default=0)

    def _now(self) -> float:
        return self._elapsed + (0.0 if self._resumed_at is None else time.perf_counter() - self._resumed_at)

    def _run(self) -> None:
        self._take()
        while not self._stop.wait(self._interval):
            self._take()

    def _take(self) -> None:
        total = sum(_or_zero(resident_bytes, process) for process in self._processes)
        if total:
            self._samples.append(MemorySample(self._now(), total))

    def __enter__(self) -> Self:
        self.resume()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pause()


def _or_zero(measure: Callable[[int], int], process: int) -> int:
    """Processes end while they are looked at; one that has ended holds nothing."""
    try:
        return measure(process)
    except (OSError, RuntimeError):
        return 0

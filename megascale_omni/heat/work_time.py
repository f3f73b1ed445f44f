"""How long the work on experts took, for display: waves are timed, and their time is split by the FLOPs of experts.

[Note: work time]
No decision may depend on a clock, so that scores count FLOPs. What people want to see are seconds: of each module the
time of its waves, less what was waited for pages in them, is divided among its experts by their tokens, part after
part of the window. On an accelerator events tell when a wave's kernels ran; nobody waits for them. Where every page
is resident there a module is one call and no wave, and nothing is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch


class Mark(Protocol):
    """A point in time on an accelerator."""

    def record(self) -> None:
        """Now, in the order of the current stream."""
        ...

    def query(self) -> bool:
        """Whether the accelerator is past it."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:  # noqa: ANN401 - of the same kind
        """Milliseconds to another one."""
        ...


def _cuda_mark() -> Mark:
    return torch.cuda.Event(enable_timing=True)


class WorkTime:
    """Seconds of work of every expert since the process began. ``waited`` tells seconds spent waiting for pages.

    ``marks`` makes points in time on an accelerator; None times on the host.
    """

    def __init__(
        self,
        *,
        waited: Callable[[], float],
        marks: Callable[[], Mark] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._waited, self._marks, self._clock = waited, marks, clock
        self._began: tuple[float, float] | Mark | None = None
        self._open: dict[int, float] = {}  # of the part at hand
        self._pending: dict[int, list[tuple[Mark, Mark]]] = {}
        self._seconds: dict[int, np.ndarray] = {}

    @classmethod
    def on(cls, device: torch.device, *, waited: Callable[[], float]) -> WorkTime:
        """As waves are timed on a device."""
        return cls(waited=waited, marks=_cuda_mark if device.type == "cuda" else None)

    def begin(self) -> None:
        """A wave begins."""
        if self._marks is None:
            self._began = self._clock(), self._waited()
        else:
            self._began = self._marks()
            self._began.record()

    def end(self, module: int) -> None:
        """The wave that has begun is over; nothing where none has."""
        began, self._began = self._began, None
        if isinstance(began, tuple):
            start, waited = began
            took = self._clock() - start - (self._waited() - waited)
            self._open[module] = self._open.get(module, 0.0) + max(0.0, took)
        elif began is not None:
            assert self._marks is not None
            end = self._marks()
            end.record()
            self._pending.setdefault(module, []).append((began, end))

    def split(self, module: int, tokens: np.ndarray) -> None:
        """The part is over in which a module's experts had so many tokens."""
        ready: list[tuple[Mark, Mark]] = []
        later: list[tuple[Mark, Mark]] = []
        for pair in self._pending.pop(module, []):
            (ready if pair[1].query() else later).append(pair)
        self._pending[module] = later
        took = self._open.pop(module, 0.0) + sum(start.elapsed_time(end) for start, end in ready) / 1e3
        seconds = self._seconds.setdefault(module, np.zeros(len(tokens)))
        if tokens.sum():
            seconds += took * tokens / tokens.sum()

    def seconds(self, module: int) -> np.ndarray | None:
        """``[experts]`` seconds of work so far; None before the first part is over."""
        return self._seconds.get(module)

"""The schedule of a step as an adapter announces it: all that residency, heat and prefetch may know about the future.

An adapter calls :meth:`Schedule.begin_step` once a step, :meth:`Schedule.enter` whenever the engine starts another
piece of work (a micro-batch's forward through a chunk, its backward, the optimizer step, evaluation). Paged modules
read :attr:`Schedule.moment` when they are called. Recompute and evaluation are phases of their own: they add no heat.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


class Phase(enum.Enum):
    """What the engine is doing."""

    IDLE = "idle"  # between steps
    FORWARD = "forward"
    RECOMPUTE = "recompute"  # a second forward of a micro-batch, inside its backward
    BACKWARD = "backward"
    STEP = "step"  # optimizer
    EVAL = "eval"  # forward only, no gradients follow


@dataclass(frozen=True)
class Moment:
    """A point of the schedule. ``step`` counts training steps from 1; 0 before the first."""

    step: int = 0
    phase: Phase = Phase.IDLE
    micro_batch: int = 0
    chunk: int = 0


class Schedule:
    """The current moment, and listeners that want to know when it changes (prefetch, heat, traces)."""

    def __init__(self) -> None:
        self._moment = Moment()
        self._listeners: list[Callable[[Moment], None]] = []
        self._step_listeners: list[Callable[[], None]] = []
        self._end_listeners: list[Callable[[], None]] = []

    @property
    def moment(self) -> Moment:
        """Where the run is now."""
        return self._moment

    def listen(self, listener: Callable[[Moment], None]) -> None:
        """Calls ``listener(moment)`` at every change."""
        self._listeners.append(listener)

    def on_step(self, listener: Callable[[], None]) -> None:
        """Calls ``listener()`` whenever a training step begins: the one before is over."""
        self._step_listeners.append(listener)

    def on_step_end(self, listener: Callable[[], None]) -> None:
        """Calls ``listener()`` whenever a training step has ended, before validation or a save."""
        self._end_listeners.append(listener)

    def end_step(self) -> None:
        """The step at hand is over: weights are stepped, or the step was left out. Adapters that know say so."""
        for listener in self._end_listeners:
            listener()

    def begin_step(self, step: int) -> None:
        """A training step starts. Raises RuntimeError when steps do not ascend."""
        if step <= self._moment.step:
            raise RuntimeError(f"step {step} is announced after step {self._moment.step}")
        self._set(Moment(step=step))
        for listener in self._step_listeners:
            listener()

    def resume_at(self, step: int) -> None:
        """A checkpoint of ``step`` completed steps was loaded; the next step is ``step + 1``."""
        self._set(Moment(step=step))

    @contextmanager
    def enter(self, phase: Phase, *, micro_batch: int = 0, chunk: int = 0) -> Iterator[Moment]:
        """The engine works on this piece until the block ends; then the moment before is current again."""
        before = self._moment
        self._set(replace(before, phase=phase, micro_batch=micro_batch, chunk=chunk))
        try:
            yield self._moment
        finally:
            self._set(replace(before, step=self._moment.step))

    def _set(self, moment: Moment) -> None:
        self._moment = moment
        for listener in self._listeners:
            listener(moment)

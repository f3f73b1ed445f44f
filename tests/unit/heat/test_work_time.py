"""Seconds of work, split among experts; of an accelerator by marks that are read when it is past them."""

import numpy as np
import pytest

from megascale_omni.heat.work_time import WorkTime


class Times:
    """A clock, what was waited for, and an accelerator that is ``behind`` of them."""

    def __init__(self) -> None:
        self.now = self.waited = self.done = 0.0

    def mark(self) -> "OfAccelerator":
        return OfAccelerator(self)


class OfAccelerator:
    """A point in time on an accelerator."""

    def __init__(self, times: Times) -> None:
        self.times, self.at = times, -1.0

    def record(self) -> None:
        self.at = self.times.now

    def query(self) -> bool:
        return self.times.done >= self.at

    def elapsed_time(self, end: "OfAccelerator") -> float:
        return 1e3 * (end.at - self.at)


def wave(work: WorkTime, times: Times, module: int, *, took: float, waited: float = 0.0) -> None:
    work.begin()
    times.now += took
    times.waited += waited
    work.end(module)


def test_waves_are_split_by_tokens_and_what_was_waited_for_is_left_out():
    times = Times()
    work = WorkTime(waited=lambda: times.waited, clock=lambda: times.now)
    assert work.seconds(0) is None
    wave(work, times, 0, took=3.0, waited=1.0)
    wave(work, times, 1, took=5.0)
    work.end(0)  # none has begun
    work.split(0, np.array([3, 1, 0]))
    assert work.seconds(0).tolist() == [1.5, 0.5, 0.0]  # type: ignore[union-attr]
    wave(work, times, 0, took=1.0)
    work.split(0, np.array([0, 0, 2]))
    work.split(1, np.array([0, 1, 0]))
    assert work.seconds(0).tolist() == [1.5, 0.5, 1.0]  # type: ignore[union-attr]
    assert work.seconds(1).tolist() == [0.0, 5.0, 0.0]  # type: ignore[union-attr]
    work.split(1, np.array([0, 0, 0]))
    assert work.seconds(1).sum() == 5.0  # type: ignore[union-attr]


def test_on_an_accelerator_nothing_waits_for_its_marks():
    times = Times()
    work = WorkTime(waited=lambda: times.waited, marks=times.mark, clock=lambda: pytest.fail("not on the host"))
    wave(work, times, 0, took=2.0)
    times.done = times.now
    wave(work, times, 0, took=3.0)
    work.split(0, np.array([1, 1]))
    assert work.seconds(0).tolist() == [1.0, 1.0]  # type: ignore[union-attr]
    times.done = times.now
    work.split(0, np.array([1, 0]))
    assert work.seconds(0).tolist() == [4.0, 1.0]  # type: ignore[union-attr]

"""How far ahead: from measured times, within bounds, and as before where nothing was measured."""

from __future__ import annotations

import pytest

from megascale_omni.paging.pace import LEAST_AHEAD, MOST_AHEAD, UNMEASURED_AHEAD, Pace


def pace(
    *, read: float | None = None, use: float | None = None, write: float | None = None, leave: float | None = None
):
    found = Pace()
    found.read_seconds, found.use_seconds, found.write_seconds, found.leave_seconds = read, use, write, leave
    return found


@pytest.mark.parametrize(
    ("read", "use", "ahead"),
    [
        (None, None, UNMEASURED_AHEAD),
        (0.01, None, UNMEASURED_AHEAD),
        (0.001, 0.1, LEAST_AHEAD),
        (0.05, 0.01, 6),
        (0.051, 0.01, 7),
        (1.0, 0.001, MOST_AHEAD),
        (1.0, 0.0, MOST_AHEAD),
    ],
)
def test_as_many_pages_ahead_as_are_used_during_a_read(read, use, ahead):
    assert pace(read=read, use=use).ahead() == ahead


@pytest.mark.parametrize(
    ("write", "leave", "slots", "behind"),
    [
        (None, None, 100, 1),
        (None, None, 3, 0),
        (0.02, 0.01, 100, 3),
        (1.0, 0.01, 100, MOST_AHEAD + 1),
        (1.0, 0.01, 20, 5),
        (0.02, 0.01, 3, 0),
    ],
)
def test_as_many_host_slots_free_as_pages_leave_during_a_write_and_a_quarter_at_most(write, leave, slots, behind):
    assert pace(write=write, leave=leave).behind(slots) == behind


def test_jobs_are_timed_and_averages_follow(monkeypatch):
    now = 0.0
    monkeypatch.setattr("megascale_omni.paging.pace.time.perf_counter", lambda: now)
    found = Pace()

    def takes(seconds: float):
        def job() -> None:
            nonlocal now
            now += seconds

        return job

    found.reading(takes(2.0))()
    assert found.read_seconds == 2.0
    for _ in range(100):
        found.reading(takes(1.0))()
        found.writing(takes(3.0))()
    assert found.read_seconds == pytest.approx(1.0, rel=1e-3)
    assert found.write_seconds == pytest.approx(3.0)
    with pytest.raises(OSError, match="gone"):
        found.reading(_fails)()
    assert found.read_seconds == pytest.approx(1.0, rel=1e-3), "what failed tells nothing"


def _fails() -> None:
    raise OSError("the disk is gone")


def test_waiting_for_pages_is_no_use_of_them(monkeypatch):
    now = 0.0
    monkeypatch.setattr("megascale_omni.paging.pace.time.perf_counter", lambda: now)
    found = Pace()
    for _ in range(3):
        found.wanted(4)
        now += 10.0  # waiting
        found.served()
        now += 2.0  # work on four pages
    assert found.use_seconds == pytest.approx(0.5)
    found.left()
    now += 0.25
    found.left()
    assert found.leave_seconds == 0.25

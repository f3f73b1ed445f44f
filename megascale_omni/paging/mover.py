"""The mover: threads that read, write and copy whole slots while the main thread computes.

Threads touch bytes only. The page table, the arenas and all decisions belong to the main thread, which submits a job
for a page and later takes it back with its result; a slot is not reused before the job that reads or writes it ended.

Threads are daemons: one that hangs in a dead disk must not keep a process from ending.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

Job = Callable[[], None]
"""What a thread does. One with ``joins(job)`` and ``together(jobs)`` is made with those that wait next and join it."""
_Task = tuple[Future[None], Job]
_Tasks = queue.SimpleQueue[_Task | None]
_Teams = Sequence[tuple[_Tasks, int]]

EXIT_SECONDS = 5.0
"""How long the end of a process waits for jobs at hand, where nobody closed the mover."""


MANY_CORES = 8
"""Cores from which on io threads do not take the ones that compute."""


class MoverStalled(RuntimeError):
    """No job ended within the timeout."""


class _Progress:
    """Counts the jobs that have ended, and wakes whoever waits for one."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.ended = 0

    def one_more(self) -> None:
        with self.condition:
            self.ended += 1
            self.condition.notify_all()

    def wait_for_more(self, seconds: float) -> bool:
        """Waits, with the condition held, until another job ends; whether one did."""
        seen = self.ended
        return self.condition.wait_for(lambda: self.ended != seen, seconds)


class Mover:
    """Runs jobs on io threads; readers and writers have threads of their own, so that neither waits for the other.

    Where nobody says how many, there are fewer readers where cores are few: on two cores, which compute at the same
    time, a third one gained nothing, and a second writer made a step 5 to 13 % shorter than one did. ``timeout`` is how
    long a wait lasts at most while no job at all ends; a long queue on a slow disk is no stall.
    """

    def __init__(
        self, *, readers: int | None = None, writers: int | None = None, timeout: timedelta = timedelta(seconds=120)
    ) -> None:
        many = len(os.sched_getaffinity(0)) >= MANY_CORES
        readers, writers = readers or (4 if many else 2), writers or 2
        self.timeout = timeout
        self._progress = _Progress()
        self._reads: _Tasks = queue.SimpleQueue()
        self._writes: _Tasks = queue.SimpleQueue()
        teams = (("megascale-read", self._reads, readers), ("megascale-write", self._writes, writers))
        self._threads = [
            threading.Thread(target=_work, args=(tasks, self._progress), name=f"{name}-{i}", daemon=True)
            for name, tasks, count in teams
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()
        # Also at exit and where nobody closes it: a daemon inside a copy would be cut off in the middle of C++.
        teams_of = ((self._reads, readers), (self._writes, writers))
        self._end = weakref.finalize(self, _end, teams_of, self._progress, tuple(self._threads))

    @property
    def _seconds(self) -> float:
        return self.timeout.total_seconds()

    @property
    def ended(self) -> int:
        """How many jobs have ended so far: where it is what it was, none has ended since."""
        return self._progress.ended

    def read(self, job: Job) -> Future[None]:
        """Starts a job that fills a slot."""
        return self._submit(self._reads, job)

    def write(self, job: Job) -> Future[None]:
        """Starts a job that saves a slot."""
        return self._submit(self._writes, job)

    def _submit(self, tasks: _Tasks, job: Job) -> Future[None]:
        if not self._end.alive:
            raise RuntimeError("the mover is closed: no page can be moved any more")
        future: Future[None] = Future()
        tasks.put((future, job))
        return future

    def wait_any(self, futures: Sequence[Future[None]], *, what: str) -> None:
        """Waits until one of the jobs has ended. Raises MoverStalled when no job of any kind ends for the timeout."""
        progress = self._progress
        with progress.condition:
            while not any(future.done() for future in futures):
                if not progress.wait_for_more(self._seconds):
                    raise MoverStalled(
                        f"{what}: no io thread answered for {self._seconds:g} s; the disk or a thread is gone"
                    )

    def close(self) -> bool:
        """Ends the threads after the jobs at hand; jobs not begun are cancelled. Idempotent.

        Returns whether all threads ended within the timeout. Where one did not, what it works on must stay as it is.
        """
        ending = self._end.detach()
        if ending is not None:
            _stop(*ending[2][:2])
        return _join(self._threads, self._seconds)


def _work(tasks: _Tasks, progress: _Progress) -> None:
    """An io thread: one job after the other, or some that join, until there comes None."""
    task = tasks.get()
    while task is not None:
        group, following, known = _joining(task, tasks)
        running = [(future, job) for future, job in group if future.set_running_or_notify_cancel()]
        error = _make([job for _, job in running])
        for future, _ in running:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
        ended = len(group)
        del task, group, running, error  # an idle thread must keep no slot alive
        for _ in range(ended):
            progress.one_more()
        task = following if known else tasks.get()
        del following


def _joining(task: _Task, tasks: _Tasks) -> tuple[list[_Task], _Task | None, bool]:
    """A task and those next in the queue that join it; then what came after them, and whether anything did."""
    group = [task]
    joins = getattr(task[1], "joins", None)
    while joins is not None:
        try:
            following = tasks.get_nowait()
        except queue.Empty:
            break
        if following is None or not joins(following[1]):
            return group, following, True
        group.append(following)
    return group, None, False


def _make(jobs: list[Job]) -> BaseException | None:
    """What went wrong in jobs that join; None where nothing did."""
    try:
        if len(jobs) == 1:
            jobs[0]()
        elif jobs:
            first: Any = jobs[0]
            first.together(jobs[1:])
    except BaseException as error:  # whatever it is, the main thread must see it
        return error
    return None


def _end(teams: _Teams, progress: _Progress, threads: Sequence[threading.Thread]) -> None:
    _stop(teams, progress)
    _join(threads, EXIT_SECONDS)


def _stop(teams: _Teams, progress: _Progress) -> None:
    """Cancels the jobs that have not begun and tells every thread to end."""
    for tasks, count in teams:
        while True:
            try:
                task = tasks.get_nowait()
            except queue.Empty:
                break
            if task is not None and task[0].cancel():
                task[0].set_running_or_notify_cancel()
                progress.one_more()
        for _ in range(count):
            tasks.put(None)


def _join(threads: Sequence[threading.Thread], seconds: float) -> bool:
    """Waits for threads; whether all have ended."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)

"""Io threads: every job ends in its future, stalls are told from long queues, no thread keeps a process from ending."""

import gc
import subprocess
import sys
import threading
import weakref
from datetime import timedelta

import pytest

from megascale_omni.paging.mover import Mover, MoverStalled

SHORT = timedelta(milliseconds=150)


@pytest.fixture
def gate():
    """Opened at the end, so that no thread of a test is left waiting."""
    event = threading.Event()
    yield event
    event.set()


def alive(mover: Mover) -> int:
    return sum(thread.is_alive() for thread in mover._threads)


def test_jobs_are_done_on_io_threads_and_their_errors_kept_for_who_asks():
    mover = Mover(readers=2, writers=1)
    names: list[str] = []

    def fail() -> None:
        raise KeyError("page")

    good, bad = mover.read(lambda: names.append(threading.current_thread().name)), mover.write(fail)
    mover.wait_any([good], what="reading")
    mover.wait_any([bad], what="writing")
    assert names[0].startswith("megascale-read")
    assert good.result() is None
    assert isinstance(bad.exception(), KeyError)
    assert mover.close()


def test_a_thread_survives_whatever_its_job_raises():
    mover = Mover(readers=1, writers=1)

    def die() -> None:
        raise SystemExit

    first, second = mover.read(die), mover.read(lambda: None)
    mover.wait_any([second], what="reading")
    assert isinstance(first.exception(), SystemExit)
    assert second.exception() is None
    assert mover.close()


def test_readers_do_not_wait_for_writers(gate):
    mover = Mover(readers=1, writers=1)
    mover.write(gate.wait)
    read = mover.read(lambda: None)
    mover.wait_any([read], what="reading")
    assert read.done()
    gate.set()
    assert mover.close()


def test_waiting_for_what_has_ended_already_returns_at_once():
    mover = Mover(timeout=SHORT)
    future = mover.read(lambda: None)
    mover.wait_any([future], what="reading")
    for _ in range(3):
        mover.wait_any([future], what="reading")
    assert mover.close()


def test_many_waits_miss_no_end():
    mover = Mover(readers=4, writers=2, timeout=timedelta(seconds=20))
    for _ in range(300):
        futures = [mover.read(lambda: None), mover.write(lambda: None)]
        mover.wait_any(futures, what="a job")
        mover.wait_any(futures[:1], what="reading")
        mover.wait_any(futures[1:], what="writing")
    assert mover.close()


def test_a_thread_that_never_answers_is_an_error_that_says_what_was_waited_for(gate):
    mover = Mover(readers=1, writers=1, timeout=SHORT)
    future = mover.read(gate.wait)
    with pytest.raises(MoverStalled, match=r"loading page 7: no io thread answered for 0\.15 s"):
        mover.wait_any([future], what="loading page 7")
    gate.set()
    assert mover.close()


def test_a_queue_that_is_longer_than_the_timeout_is_no_stall(gate):
    """One thread and slow jobs: the last one ends after the timeout, yet something ends within any such time."""
    mover = Mover(readers=1, writers=1, timeout=timedelta(seconds=1))

    def slow() -> None:
        gate.wait(0.15)

    futures = [mover.read(slow) for _ in range(8)]
    mover.wait_any(futures[-1:], what="the last")
    assert all(future.done() for future in futures)
    assert mover.close()


def test_closing_ends_the_job_at_hand_and_cancels_the_others(gate):
    mover = Mover(readers=1, writers=1)
    begun = threading.Event()

    def first() -> None:
        begun.set()
        gate.wait(5)

    running = mover.read(first)
    waiting = [mover.read(lambda: None) for _ in range(3)]
    begun.wait(5)
    threading.Timer(0.05, gate.set).start()
    assert mover.close()
    assert running.exception() is None
    assert all(future.cancelled() for future in waiting)
    mover.wait_any(waiting, what="what was cancelled")  # has ended, too
    assert alive(mover) == 0


def test_closing_is_idempotent_and_final():
    mover = Mover()
    assert mover.close()
    assert mover.close()
    for submit in (mover.read, mover.write):
        with pytest.raises(RuntimeError, match="the mover is closed"):
            submit(lambda: None)


def test_closing_says_where_a_thread_does_not_end(gate):
    mover = Mover(readers=1, writers=1, timeout=SHORT)
    begun = threading.Event()

    def hang() -> None:
        begun.set()
        gate.wait()

    mover.read(hang)
    begun.wait(5)
    assert not mover.close()
    gate.set()
    assert mover.close()


def test_a_mover_that_nobody_keeps_ends_its_threads():
    mover = Mover()
    threads, gone = mover._threads, weakref.ref(mover)
    del mover
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def test_a_process_ends_though_an_io_thread_hangs():
    code = """
import threading
from datetime import timedelta
from megascale_omni.paging import mover
mover.EXIT_SECONDS = 0.2
begun = threading.Event()
kept = mover.Mover(timeout=timedelta(seconds=60))
kept.read(lambda: (begun.set(), threading.Event().wait()))
begun.wait(5)
print("main ends")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "main ends\n", "")

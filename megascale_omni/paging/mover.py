"""The mover: threads that read, write and copy whole slots while the main thread computes.

Threads touch bytes only. The page table, the arenas and all decisions belong to the main thread, which submits a job
for a page and later takes it back with its result; a slot is not reused before the job that reads or writes it has ended.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta


class MoverStalled(RuntimeError):
    """A job did not end within the timeout."""


class Mover:
    """Runs jobs on io threads; readers and writers have threads of their own, so that neither waits for the other."""

    def __init__(self, *, readers: int = 4, writers: int = 2, timeout: timedelta = timedelta(seconds=120)) -> None:
        self.timeout = timeout
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="megascale-read")
        self._writers = ThreadPoolExecutor(writers, thread_name_prefix="megascale-write")

    def read(self, job: Callable[[], None]) -> Future[None]:
        """Starts a job that fills a slot."""
        return self._readers.submit(job)

    def write(self, job: Callable[[], None]) -> Future[None]:
        """Starts a job that saves a slot."""
        return self._writers.submit(job)

    def wait_any(self, futures: list[Future[None]], *, what: str) -> None:
        """Waits until one of the jobs has ended. Raises MoverStalled when none does in time."""
        done, _ = concurrent.futures.wait(
            futures, timeout=self.timeout.total_seconds(), return_when=concurrent.futures.FIRST_COMPLETED
        )
        if not done:
            raise MoverStalled(
                f"{what}: no io thread answered for {self.timeout.total_seconds():.0f} s; the disk or a thread is gone"
            )

    def close(self) -> None:
        """Ends the threads after the jobs at hand."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._writers.shutdown(wait=True, cancel_futures=True)

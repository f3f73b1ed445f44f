"""Io that ends in ever another order: random pauses before the jobs of io threads."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from megascale_omni.paging.mover import Job, Mover


class Pauses:
    """Pauses of up to ``longest`` seconds, drawn from ``seed`` as the jobs begin, on whatever threads."""

    def __init__(self, seed: int | str, *, longest: float) -> None:
        self._random, self._lock, self._longest = random.Random(seed), threading.Lock(), longest

    def before(self, job: Job) -> Job:
        """The job, after a pause on its io thread."""

        def run() -> None:
            with self._lock:
                seconds = self._random.uniform(0.0, self._longest)
            time.sleep(seconds)
            job()

        return run


@contextmanager
def delayed_io(seed: int | str, *, longest: float) -> Iterator[None]:
    """While it lasts, every io job of every mover begins after a pause."""
    pauses, read, write = Pauses(seed, longest=longest), Mover.read, Mover.write
    with mock.patch.multiple(
        Mover,
        read=lambda mover, job: read(mover, pauses.before(job)),
        write=lambda mover, job: write(mover, pauses.before(job)),
    ):
        yield

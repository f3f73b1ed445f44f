"""Movers for tests: one whose jobs end when and in the order the test says, and one with slow io threads."""

import random
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta

from megascale_omni.paging.mover import Job, Mover, MoverStalled
from scripts.measurements.slow_io import Pauses


class ManualMover(Mover):
    """Makes a job only when :meth:`complete` says so, or when the main thread waits: then pending jobs end in an order
    drawn from ``seed``, until one that is waited for has. Nothing is left to the timing of threads.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(readers=0, writers=0, timeout=timedelta(seconds=1))
        self.pending: list[tuple[Future[None], Job, str]] = []
        self._random = random.Random(seed)

    def read(self, job: Job) -> Future[None]:
        return self._keep(job, "read")

    def write(self, job: Job) -> Future[None]:
        return self._keep(job, "write")

    def _keep(self, job: Job, kind: str) -> Future[None]:
        future: Future[None] = Future()
        self.pending.append((future, job, kind))
        return future

    def complete(self, kind: str | None = None, *, index: int = 0) -> None:
        """Makes the pending job ``index``, of those of a kind where one is given."""
        chosen = [entry for entry in self.pending if kind in (None, entry[2])][index]
        self.pending.remove(chosen)
        future, job, _ = chosen
        try:
            job()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        self._progress.one_more()

    def complete_all(self) -> None:
        """Makes all pending jobs."""
        while self.pending:
            self.complete()

    def wait_any(self, futures: Sequence[Future[None]], *, what: str) -> None:
        while not any(future.done() for future in futures):
            if not self.pending:
                raise MoverStalled(what)
            self.complete(index=self._random.randrange(len(self.pending)))

    def close(self) -> bool:
        for future, _, _ in self.pending:
            future.cancel()
            self._progress.one_more()
        self.pending.clear()
        return super().close()


class SlowMover(Mover):
    """Its io threads sleep before each job, up to ``longest`` seconds as drawn from ``seed``."""

    def __init__(self, seed: int, *, longest: float = 0.002) -> None:
        super().__init__()
        self._pauses = Pauses(seed, longest=longest)

    def read(self, job: Job) -> Future[None]:
        return super().read(self._pauses.before(job))

    def write(self, job: Job) -> Future[None]:
        return super().write(self._pauses.before(job))

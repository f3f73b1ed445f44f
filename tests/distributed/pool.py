"""Ranks that live as long as the test session.

Starting processes and importing Megatron-Core in each would cost more than most distributed tests do. So there is one
pool of ranks a world size, started at its first use, and a test hands it a module-level function:

    def sum_of_ranks(rank: int, world: int, start: int) -> int:
        total = torch.tensor(start + rank)
        torch.distributed.all_reduce(total)
        return int(total)

    def test_sum(pools):
        assert pools[2].run(sum_of_ranks, start=5) == [11, 11]

Each run has a new default gloo group, one thread a rank and the same random seed on every rank. What functions change
beside that (parallel state of Megatron, patches) stays, so functions set up what they stand on. After a failure of any
kind the ranks are ended, and the next run has new ones: nobody knows in what state the failed ones are, and new ones
are forked in a fraction of a second from a process that has imported torch and Megatron-Core once.
"""

import contextlib
import multiprocessing
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.distributed import pool_worker
from tests.distributed.pool_worker import Answer, Failure, Job

# Loaded once, in the process that ranks are forked from; neither starts a thread.
PRELOADED = ["torch", "torch.distributed", "megatron.core.optimizer", "megatron.core.models.gpt"]

# How long ranks get to answer after another one raised or died: they may wait for it in a collective.
GRACE_SECONDS = 3.0
GRACE_AFTER_DEATH_SECONDS = 1.0


class PoolError(RuntimeError):
    """Some ranks raised, died or did not answer. ``ranks``: which ones."""

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


class RanksRaised(PoolError):
    """``failures``: rank -> what it raised, as type name, text and traceback."""

    def __init__(self, message: str, failures: dict[int, Failure]) -> None:
        super().__init__(message, sorted(failures))
        self.failures = failures


class RanksDied(PoolError):
    """Processes of the pool ended by themselves."""


class RanksSilent(PoolError):
    """Ranks did not answer in time."""


@dataclass
class _Rank:
    process: ForkServerProcess
    connection: Connection


@dataclass
class _Round:
    """What is known of one run: every rank is in one of the three, or still awaited."""

    results: dict[int, object]
    failures: dict[int, Failure]
    died: dict[int, int | None]

    def awaited(self, world: int) -> list[int]:
        answered = {*self.results, *self.failures, *self.died}
        return [rank for rank in range(world) if rank not in answered]


class Pool:
    """``world`` ranks. They start at the first run, and anew at the run after they were stopped."""

    def __init__(self, world: int) -> None:
        if world < 1:
            raise ValueError(f"a pool of {world} ranks: at least 1 is needed")
        self.world = world
        self._ranks: list[_Rank] = []
        self._folder: Path | None = None
        self._runs = 0

    def run(
        self, function: Callable[..., object] | str, *, timeout_seconds: float = 90.0, **arguments: object
    ) -> list[Any]:
        """``function(rank, world, **arguments)`` on every rank; returns the results by rank.

        ``function`` is defined at the top level of a module that ranks can import, or is its path ``"module:name"``.
        Arguments and results travel by pickle; tensors are copied.

        Raises:
            ValueError: the function is not one that ranks can import.
            RanksRaised: with the traceback of every rank that raised.
            RanksDied: naming them and their exit codes.
            RanksSilent: naming them and where they stood.
        """
        job = Job(_path_of(function), arguments, self._runs, timeout_seconds)
        self._runs += 1
        message = pickle.dumps(job)
        try:
            self._start()
            for rank in self._ranks:
                with contextlib.suppress(
                    BrokenPipeError, ConnectionResetError
                ):  # it died meanwhile: seen on collecting
                    rank.connection.send_bytes(message)
            outcome = self._collect(timeout_seconds)
            self._raise_for(outcome, job)
        except BaseException:  # a time-out of the test runner and Ctrl-C, too, leave answers behind that nobody reads
            self.stop()
            raise
        return [outcome.results[rank] for rank in range(self.world)]

    def stop(self) -> None:
        """End the ranks at once, whatever they do. The next run starts new ones."""
        for rank in self._ranks:
            rank.process.kill()
            rank.connection.close()
        for rank in self._ranks:
            rank.process.join(timeout=10)
        self._ranks = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @property
    def folder(self) -> Path | None:
        """What the ranks now alive meet in; goes when they go."""
        return self._folder

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks now alive, by rank; empty before the first run."""
        return [rank.process.pid for rank in self._ranks if rank.process.pid is not None]

    def _start(self) -> None:
        if self._ranks:
            return
        context = _context()
        self._folder = Path(tempfile.mkdtemp(prefix="megascale-pool-"))
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(
                target=pool_worker.main, args=(there, rank, self.world, str(self._folder)), daemon=True
            )
            process.start()
            there.close()
            self._ranks.append(_Rank(process, here))

    def _collect(self, timeout_seconds: float) -> _Round:
        outcome = _Round({}, {}, {})
        deadline = time.monotonic() + timeout_seconds
        while awaited := outcome.awaited(self.world):
            waited = {self._ranks[rank].connection: rank for rank in awaited}
            ready = wait(list(waited), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                self._receive(waited[connection], outcome)
            if outcome.died:
                deadline = min(deadline, time.monotonic() + GRACE_AFTER_DEATH_SECONDS)
            elif outcome.failures:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return outcome

    def _receive(self, rank: int, outcome: _Round) -> None:
        try:
            answer: Answer = pickle.loads(self._ranks[rank].connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._ranks[rank].process.join(timeout=10)
            outcome.died[rank] = self._ranks[rank].process.exitcode
            return
        if isinstance(answer.value, Failure):
            outcome.failures[rank] = answer.value
        else:
            outcome.results[rank] = answer.value

    def _raise_for(self, outcome: _Round, job: Job) -> None:
        silent = outcome.awaited(self.world)
        waiting = f"; ranks {silent} waited on" if silent else ""
        if outcome.died:
            codes = ", ".join(f"rank {rank} with exit code {code}" for rank, code in sorted(outcome.died.items()))
            texts = "".join(f"\n{failure.traceback}" for failure in outcome.failures.values())
            raise RanksDied(f"{job.function} of {self.world} ranks: {codes} died{waiting}{texts}", sorted(outcome.died))
        if outcome.failures:
            texts = "".join(
                f"\n--- rank {rank}: {failure.type_name}: {failure.text}\n{failure.traceback}"
                for rank, failure in sorted(outcome.failures.items())
            )
            raise RanksRaised(f"{job.function} of {self.world} ranks raised{waiting}{texts}", outcome.failures)
        if silent:
            places = "".join(f"\n--- rank {rank} stood at\n{self._stack_of(rank)}" for rank in silent)
            late = f"no answer from ranks {silent} in {job.timeout_seconds:g} s"
            raise RanksSilent(f"{job.function} of {self.world} ranks: {late}{places}", silent)

    def _stack_of(self, rank: int) -> str:
        assert self._folder is not None
        path = pool_worker.stack_path(str(self._folder), rank)
        return path.read_text() if path.exists() else "(the rank had not started)"


class Pools:
    """One pool a world size: ``pools[4]``. Leaving the ``with`` block ends all of them."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __getitem__(self, world: int) -> Pool:
        if world not in self._pools:
            self._pools[world] = Pool(world)
        return self._pools[world]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in self._pools.values():
            pool.stop()


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _path_of(function: Callable[..., object] | str) -> str:
    if isinstance(function, str):
        path = function
    else:
        path = f"{function.__module__}:{function.__qualname__}"
    module, _, name = path.partition(":")
    if not module or not name.isidentifier() or module == "__main__":
        raise ValueError(f"ranks cannot import {path!r}: give a function at the top level of an importable module")
    return path

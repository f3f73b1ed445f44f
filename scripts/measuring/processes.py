"""Ranks of a run in processes of their own, spoken to through pipes.

    with Workers("scripts.comparison.worker:TrainingRun", ranks=2, threads=1, name="stock", arguments={...}) as run:
        results = run.call("train", timeout_seconds=60, steps=5)     # one result a rank

Each process makes one object of the named class, `Class(rank, world, **arguments)`, inside a gloo (or nccl) group that
meets in a file: no port is opened. Whatever goes wrong in one rank ends all of them and is raised here with that rank's
traceback; a rank that does not answer in time, likewise. Processes end with this one, however it ends.
"""

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_SECONDS = 180.0
GRACE_SECONDS = 3.0
"""How long ranks get to answer after another one failed: they may wait for it in a collective."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class WorkersFailed(RuntimeError):
    """Ranks raised, died or did not answer. `user_error`: the text, where the cause is a mistake of the user."""

    def __init__(self, message: str, *, user_error: str | None = None) -> None:
        super().__init__(message)
        self.user_error = user_error


@dataclass(frozen=True)
class Start:
    """What a process is told first."""

    target: str
    rank: int
    world: int
    rendezvous: str
    threads: int
    timeout_seconds: float
    arguments: dict[str, object]


@dataclass(frozen=True)
class Call:
    """A method to call on the rank's object."""

    method: str
    arguments: dict[str, object]


@dataclass(frozen=True)
class Reply:
    """What the method returned."""

    value: object


@dataclass(frozen=True)
class Failed:
    """What was raised; text, because not every exception survives a pickle."""

    type_name: str
    text: str
    traceback: str
    is_user_error: bool


class Workers:
    """`ranks` processes with one object each; see the module."""

    def __init__(
        self,
        target: str,
        *,
        ranks: int,
        threads: int,
        name: str,
        arguments: Mapping[str, object],
        group_timeout_seconds: float = 600.0,
    ) -> None:
        self.name = name
        self._folder = Path(tempfile.mkdtemp(prefix="megascale-run-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._ready = False
        try:
            for rank in range(ranks):
                self._spawn(rank, ranks, threads)
                start = Start(
                    target=target,
                    rank=rank,
                    world=ranks,
                    rendezvous=str(self._folder / "rendezvous"),
                    threads=threads,
                    timeout_seconds=group_timeout_seconds,
                    arguments=dict(arguments),
                )
                self._connections[rank].send_bytes(pickle.dumps(start))
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Process ids by rank."""
        return tuple(process.pid for process in self._processes)

    def wait_until_ready(self, *, timeout_seconds: float = START_TIMEOUT_SECONDS) -> None:
        """Wait until every rank has made its object. `call` does so by itself.

        Raises:
            WorkersFailed: a rank raised, died or took too long.
        """
        if not self._ready:
            self._collect("starting", timeout_seconds)
            self._ready = True

    def call(self, method: str, *, timeout_seconds: float, **arguments: object) -> list[Any]:
        """Call a method of every rank's object at once; returns the results by rank.

        Raises:
            WorkersFailed: a rank raised, died or took too long.
        """
        self.wait_until_ready()
        message = pickle.dumps(Call(method, arguments))
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died meanwhile: seen on collecting
                connection.send_bytes(message)
        return self._collect(method, timeout_seconds)

    def close(self) -> None:
        """End the processes, whatever they do; idempotent."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(timeout=10)
        self._connections, self._processes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _spawn(self, rank: int, world: int, threads: int) -> None:
        here, there = Pipe()
        environment = {
            **os.environ,
            **dict.fromkeys(_THREAD_VARIABLES, str(threads)),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "GLOO_SOCKET_IFNAME": "lo",  # nothing here listens beyond this machine
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1",
        }
        with self._log_path(rank).open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "scripts.measuring.worker_main", str(there.fileno()), str(os.getpid())],
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[there.fileno()],
                )
            )
        there.close()
        self._connections.append(here)

    def _log_path(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def _collect(self, what: str, timeout_seconds: float) -> list[Any]:
        replies: dict[int, object] = {}
        problems: dict[int, str] = {}
        user_errors: list[str] = []
        deadline = time.monotonic() + timeout_seconds
        while awaited := [rank for rank in range(len(self._connections)) if rank not in replies | problems]:
            by_connection = {self._connections[rank]: rank for rank in awaited}
            ready = wait(list(by_connection), max(0.0, deadline - time.monotonic()))
            if not ready:
                problems.update({rank: f"no answer{self._log_tail(rank)}" for rank in awaited})
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = by_connection[connection]
                answer = _receive(connection)
                if isinstance(answer, Reply):
                    replies[rank] = answer.value
                    continue
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                if isinstance(answer, Failed):
                    problems[rank] = f"{answer.type_name}: {answer.text}\n{answer.traceback}"
                    user_errors += [answer.text] if answer.is_user_error else []
                else:
                    code = self._processes[rank].wait(timeout=10)
                    problems[rank] = f"died with exit code {code}{self._log_tail(rank)}"
        if problems:
            self.close()
            texts = "".join(f"\n--- rank {rank}: {text}" for rank, text in sorted(problems.items()))
            raise WorkersFailed(
                f"{self.name}: {what} failed on ranks {sorted(problems)} (of {len(replies) + len(problems)}){texts}",
                user_error=user_errors[0] if user_errors else None,
            )
        return [replies[rank] for rank in sorted(replies)]

    def _log_tail(self, rank: int) -> str:
        path = self._log_path(rank)
        lines = path.read_text(errors="replace").splitlines()[-30:] if path.exists() else []
        return "".join(f"\n    {line}" for line in lines)


def _receive(connection: Connection) -> object | None:
    """The next message; None where the process has ended."""
    try:
        return pickle.loads(connection.recv_bytes())  # from a process that this one started
    except (EOFError, ConnectionResetError):
        return None

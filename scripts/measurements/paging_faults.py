"""Faults of disks and io threads, injected into a whole small training: each is named, or has changed no bit.

    python -m scripts.measurements.paging_faults --count 200 --seed 1

A fault happens at one numbered call of one direction (read or write), counted over all io threads. What follows may be
an error that names the page, or the very result of the run without the fault, nothing else, and no file may be left. A
run in which the fault did not happen proves nothing and counts as failed.
"""

from __future__ import annotations

import argparse
import errno
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Literal, get_args
from unittest import mock

from megascale_omni.paging.budget import Budget
from megascale_omni.paging.disk import PageIoError
from megascale_omni.paging.layout import SLOT_ALIGNMENT
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.paging.mover import Mover, MoverStalled
from scripts.measurements.paging_model import Task, Trained, train

Kind = Literal[
    "short read",
    "short write",
    "slow disk",
    "EIO on read",
    "EIO on write",
    "ENOSPC",
    "flipped bit",
    "forgotten write",
    "truncated file",
    "io thread killed",
    "io thread hangs",
    "process killed in mid-write",
]
HARMLESS = ("short read", "short write", "slow disk")
"""Kinds after which training must go on as if nothing had happened."""
ON_READ = ("short read", "EIO on read", "truncated file", "io thread killed", "io thread hangs")
"""Kinds that happen at a read; the others happen at a write."""

TASK = Task(steps=2, micro_batches=1, tokens=12, evaluate=False)
FRACTION = 0.25
STALL = timedelta(seconds=0.3)
"""How long a run waits for an io thread that hangs."""
CHILD_SECONDS = 120.0
MODULE = "scripts.measurements.paging_faults"

_Call = Callable[..., int]


@dataclass(frozen=True)
class Fault:
    """What happens, and at which call of its direction (from 1). ``seed`` draws what else is random about it."""

    kind: Kind
    at: int
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What became of a run: whether the fault happened, the error it ended with, what differs from a run without."""

    fault: Fault
    fired: bool
    error: str | None
    named: bool = True
    differs: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    @property
    def problem(self) -> str | None:
        """What must not be; None where all is well."""
        if not self.fired:
            return "the fault did not happen"
        if self.left:
            return f"files are left: {', '.join(self.left)}"
        if self.error is not None and self.fault.kind in HARMLESS:
            return f"a harmless fault ended the run: {self.error}"
        if self.error is not None and not self.named:
            return f"the error does not say what happened: {self.error}"
        if self.error is None and self.differs:
            return f"trained on with wrong bytes: {', '.join(self.differs[:3])}"
        return None


@dataclass
class _Injector:
    """Stands in for os.preadv and os.pwritev, and makes the fault happen at its call."""

    fault: Fault
    fired: bool = False
    calls: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    released: threading.Event = field(default_factory=threading.Event)
    preadv: _Call = os.preadv
    pwritev: _Call = os.pwritev

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """os.preadv, or the fault."""
        return self._call("read", self.preadv, fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """os.pwritev, or the fault."""
        return self._call("write", self.pwritev, fd, buffers, offset)

    def _call(self, direction: str, real: _Call, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self.lock:
            self.calls[direction] += 1
            now = direction == ("read" if self.fault.kind in ON_READ else "write")
            now = now and self.calls[direction] == self.fault.at
            self.fired |= now
        return self._fail(real, fd, buffers, offset) if now else real(fd, buffers, offset)

    def _fail(self, real: _Call, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        drawn, total = random.Random(self.fault.seed), len(buffers[0])
        match self.fault.kind:
            case "short read" | "short write":
                blocks = drawn.randrange(1, max(2, total // SLOT_ALIGNMENT))
                return real(fd, [buffers[0][: blocks * SLOT_ALIGNMENT]], offset)
            case "slow disk":
                time.sleep(drawn.uniform(0.02, 0.1))
                return real(fd, buffers, offset)
            case "EIO on read" | "EIO on write":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            case "ENOSPC":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case "flipped bit":
                done = real(fd, buffers, offset)
                self._flip(fd, offset + drawn.randrange(total), drawn.randrange(8))
                return done
            case "forgotten write":
                return total
            case "truncated file":
                os.ftruncate(fd, 0)
                return real(fd, buffers, offset)
            case "io thread killed":
                raise SystemExit("killed")
            case "io thread hangs":
                self.released.wait()
                return real(fd, buffers, offset)
            case "process killed in mid-write":
                real(fd, [buffers[0][:SLOT_ALIGNMENT]], offset)
                os.kill(os.getpid(), signal.SIGKILL)
                raise AssertionError("unreachable")

    def _flip(self, fd: int, position: int, bit: int) -> None:
        """Changes a bit of the file, through a block of memory that direct io takes."""
        block, start = mmap.mmap(-1, SLOT_ALIGNMENT), position - position % SLOT_ALIGNMENT
        self.preadv(fd, [block], start)
        block[position - start] ^= 1 << bit
        self.pwritev(fd, [block], start)


@contextmanager
def injected(fault: Fault) -> Iterator[_Injector]:
    """While it lasts, the fault happens at its call."""
    injector = _Injector(fault)
    with mock.patch.object(os, "preadv", injector.read), mock.patch.object(os, "pwritev", injector.write):
        try:
            yield injector
        finally:
            injector.released.set()


def _options(folder: Path) -> PagingOptions:
    return PagingOptions(device_budget=Budget(fraction=FRACTION), disk_path=folder, checksum="crc32")


@cache
def expected() -> Trained:
    """The result of a run in which nothing happens, all pages resident."""
    return train(TASK)


@cache
def usual_calls() -> dict[str, int]:
    """Reads and writes of a run in which nothing happens; another run may have a few more or less."""
    never = Fault("slow disk", at=-1)
    with tempfile.TemporaryDirectory(prefix="megascale-faults-") as folder, injected(never) as injector:
        train(TASK, _options(Path(folder)))
    return dict(injector.calls)


def run(fault: Fault, folder: Path) -> Outcome:
    """Trains with a fault, in an empty folder on a disk."""
    if fault.kind == "process killed in mid-write":
        return _run_child(fault, folder)
    error, differs, named = None, [], True
    hangs = fault.kind == "io thread hangs"
    with injected(fault) as injector:
        try:
            mover = Mover(timeout=STALL) if hangs else None
            differs = train(TASK, _options(folder), mover=mover).differs_from(expected())
        except (PageIoError, MoverStalled, RuntimeError) as caught:
            error = f"{type(caught).__name__}: {caught}"
            right = {"io thread hangs": MoverStalled, "io thread killed": RuntimeError}.get(fault.kind, PageIoError)
            named = isinstance(caught, right) and (" page of layers." in str(caught) or hangs)
    return Outcome(fault, injector.fired, error, named, tuple(differs), tuple(sorted(os.listdir(folder))))


def _run_child(fault: Fault, folder: Path) -> Outcome:
    command = [sys.executable, "-m", MODULE, "--child", str(folder), "--at", str(fault.at)]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=CHILD_SECONDS, check=False)
    killed = ended.returncode == -signal.SIGKILL
    error = f"killed by signal {-ended.returncode}" if killed else f"ended with {ended.returncode}: {ended.stderr}"
    return Outcome(fault, killed, error, left=tuple(sorted(os.listdir(folder))))


def random_faults(count: int, *, seed: int, kinds: Sequence[Kind] = get_args(Kind)) -> list[Fault]:
    """Faults of all kinds in turn, each at a random call of the first half of a run, so that it does happen."""
    drawn = random.Random(seed)
    calls = usual_calls()
    faults = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        most = calls["read" if kind in ON_READ else "write"] // 2
        faults.append(Fault(kind, at=drawn.randint(1, most), seed=drawn.randrange(2**31)))
    return faults


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--at", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child is not None:
        with injected(Fault("process killed in mid-write", args.at)):
            train(TASK, _options(args.child))
        return 0
    ended: dict[str, Counter[str]] = {}
    problems = []
    for fault in random_faults(args.count, seed=args.seed):
        with tempfile.TemporaryDirectory(prefix="megascale-faults-") as folder:
            outcome = run(fault, Path(folder))
        counter = ended.setdefault(fault.kind, Counter())
        counter["same result" if outcome.error is None else "named error"] += outcome.problem is None
        if outcome.problem is not None:
            problems.append(f"{fault}: {outcome.problem}")
            print(problems[-1], file=sys.stderr, flush=True)
    print(json.dumps({"faults": args.count, "seed": args.seed, "ended": ended, "problems": problems}, indent=1))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

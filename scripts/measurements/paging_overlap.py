"""How well io and computation overlap: a training under a budget beside its computation alone and its io alone.

All three are measured in the same run, in turn. Computation alone is the same training with every page resident. Io
alone is what the paged training read and wrote, in the same order and by as many threads, with nothing in between. No
training can be faster than the slower of the two; the share of that bound is what is reported.
"""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from megascale_omni.paging.budget import Budget
from megascale_omni.paging.disk import DiskFile
from megascale_omni.paging.layout import SlotClass
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.paging.mover import Mover
from megascale_omni.paging.tiers import Arena
from scripts.measurements.paging_model import CPU, Model, Task, Trained
from scripts.measuring.progress import say
from scripts.measuring.statistics import summarize

BUDGET = 0.25
TASK = Task(
    modules=4,
    experts=16,
    active=16,
    tokens=512,
    hidden=512,
    ffn=1024,
    rows=512,
    bias=False,
    micro_batches=1,
    evaluate=False,
    batch_bytes=2 * 2**20,
    blas=False,
)
"""1.5 GiB of state in pages of 3 MiB."""

EQUAL = 1.3
"""Computation and io are taken to be equal within this factor."""
TWICE = 2.0
_ATTEMPTS = 6
_MOST_TOKENS = 1 << 17
_WAIT_SECONDS = 300.0
_SLOTS = 16


@dataclass(frozen=True)
class Overlap:
    """Seconds a step: median over steps of each of the three."""

    computing: float
    moving: float
    paged: float
    bytes_moved: int
    tokens: int

    @property
    def share(self) -> float:
        """The bound over what it took: 1 is perfect."""
        return max(self.computing, self.moving) / self.paged

    @property
    def ratio(self) -> float:
        """Computation over io."""
        return self.computing / self.moving

    def describe(self) -> str:
        """All of it in a line."""
        return (
            f"{self.tokens} tokens: computing {self.computing:.2f} s, io {self.moving:.2f} s "
            f"({self.bytes_moved / 2**30:.2f} GiB), paged {self.paged:.2f} s: {self.share:.3f} of the bound"
        )


@dataclass(frozen=True)
class _Transfer:
    """A read or a write of a slot as the disk file saw it."""

    is_read: bool
    offset: int
    nbytes: int


@dataclass
class _Log:
    """Notes the transfers of a disk file while ``on``."""

    disk: DiskFile
    on: bool = False
    transfers: list[_Transfer] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.disk.read = self._noted(self.disk.read, is_read=True)  # type: ignore[method-assign]
        self.disk.write = self._noted(self.disk.write, is_read=False)  # type: ignore[method-assign]

    def _noted(self, call: Callable[..., None], *, is_read: bool) -> Callable[..., None]:
        def noted(offset: int, slot: torch.Tensor, *, name: Callable[[], str]) -> None:
            if self.on:
                with self.lock:
                    self.transfers.append(_Transfer(is_read, offset, slot.numel() * slot.element_size()))
            call(offset, slot, name=name)

        return noted


class _Bench:
    """The two trainings and the file for io alone, in one folder."""

    def __init__(self, task: Task, folder: Path) -> None:
        options = PagingOptions(device_budget=Budget(fraction=BUDGET), disk_path=folder)
        self.resident = Model(task, PagingOptions(), poison=False)
        self.paged = Model(task, options, poison=False)
        disk = self.paged.manager.pager.tiers.disk
        assert disk is not None
        self.log = _Log(disk)
        self.alone = _IoAlone(folder, disk.size, task.layout.slot_class(torch.float32))
        self._steps = 0

    def step(self, tokens: int) -> Overlap:
        """One step of each, and the io of the paged one again."""
        self._steps += 1
        for model in (self.resident, self.paged):
            model.task = replace(model.task, tokens=tokens)
        computing = _seconds(lambda: self.resident.step(self._steps, Trained()))
        self.log.transfers, self.log.on = [], True
        paged = _seconds(lambda: self.paged.step(self._steps, Trained()))
        self.log.on = False
        moving = _seconds(lambda: self.alone.repeat(self.log.transfers))
        moved = sum(transfer.nbytes for transfer in self.log.transfers)
        return Overlap(computing, moving, paged, moved, tokens)

    def close(self) -> None:
        self.resident.manager.close()
        self.paged.manager.close()
        self.alone.close()


class _IoAlone:
    """A disk file like the one of the pages, and io threads like theirs."""

    def __init__(self, folder: Path, size: int, slot_class: SlotClass) -> None:
        self.disk, self.mover, self.slot_class = DiskFile(folder), Mover(), slot_class
        self.disk.reserve(size)
        self.arena = Arena(device=CPU)
        self.slots: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(_SLOTS):
            self.slots.put(self.arena.tensor(slot_class, self.arena.allocate(slot_class)).normal_())
        for offset in range(0, size, slot_class.nbytes):
            self._transfer(_Transfer(False, offset, slot_class.nbytes))

    def repeat(self, transfers: Sequence[_Transfer]) -> None:
        """Makes the transfers; returns when all have ended."""
        last: dict[int, Future[None]] = {}
        for transfer in transfers:
            if transfer.offset in last:  # two at once on the same page may not be
                last[transfer.offset].result(timeout=_WAIT_SECONDS)
            start = self.mover.read if transfer.is_read else self.mover.write
            last[transfer.offset] = start(partial(self._transfer, transfer))
        for future in last.values():
            future.result(timeout=_WAIT_SECONDS)

    def _transfer(self, transfer: _Transfer) -> None:
        slot = self.slots.get()  # there are more than threads
        try:
            call = self.disk.read if transfer.is_read else self.disk.write
            call(transfer.offset, slot, name=lambda: "page")
        finally:
            self.slots.put(slot)

    def close(self) -> None:
        self.mover.close()
        self.disk.close()


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(wanted: Callable[[float], float], *, task: Task = TASK, steps: int = 5) -> Overlap:
    """Finds a number of tokens at which computation and io have the wanted proportion, then measures.

    Args:
        wanted: by what the number of tokens has to be multiplied at a ratio of computation to io; 1 where it is right.
        task: what is trained; tokens are where the search begins.
        steps: measured steps of each attempt.

    Raises:
        RuntimeError: the proportion is not reached; the machine does too many other things.
    """
    with tempfile.TemporaryDirectory(prefix="megascale-overlap-") as folder:
        bench, tokens = _Bench(task, Path(folder)), task.tokens
        try:
            for _ in range(2):
                bench.step(tokens)  # fills the arena, and teaches the forecast
            for _ in range(_ATTEMPTS):
                found = _median([bench.step(tokens) for _ in range(steps)])
                say(f"    {found.describe()}")
                factor = wanted(found.ratio)
                if factor == 1:
                    return found
                tokens = max(16, min(_MOST_TOKENS, round(tokens * factor)))
                bench.step(tokens)
        finally:
            bench.close()
    raise RuntimeError(f"computation and io do not come to the wanted proportion: {found.describe()}")


def equal(ratio: float) -> float:
    """Wants computation and io equal within :data:`EQUAL`."""
    return 1.0 if 1 / EQUAL <= ratio <= EQUAL else min(4.0, max(0.25, 1 / ratio))


def more_computation(ratio: float) -> float:
    """Wants at least :data:`TWICE` as much computation as io, and not much more."""
    return 1.0 if TWICE <= ratio <= 1.5 * TWICE else min(4.0, max(0.25, 1.2 * TWICE / ratio))


def more_io(ratio: float) -> float:
    """Wants at least :data:`TWICE` as much io as computation."""
    return 1.0 if ratio <= 1 / TWICE else min(0.8, 1 / (1.2 * TWICE * ratio))


def _median(found: Sequence[Overlap]) -> Overlap:
    def median(name: str) -> float:
        return summarize([getattr(overlap, name) for overlap in found]).median

    return Overlap(
        computing=median("computing"),
        moving=median("moving"),
        paged=median("paged"),
        bytes_moved=round(median("bytes_moved")),
        tokens=found[-1].tokens,
    )

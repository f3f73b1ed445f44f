"""Measures a disk as pages use it: direct io on a nameless file, checksums as in a run, several requests at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megascale_omni.paging.disk import DiskFile
from megascale_omni.paging.layout import MIB, SLOT_ALIGNMENT
from megascale_omni.paging.mover import Mover

REQUEST_BYTES = 16 * MIB
_SLOTS = 16
"""More than there are threads."""


@dataclass(frozen=True)
class Disk:
    """Bytes/s of reading alone, of writing alone, and of half and half at once (both together); what paging reaches."""

    read_bytes_s: float
    write_bytes_s: float
    mixed_bytes_s: float
    efficiency: float = 1.0

    @classmethod
    def of(cls, bytes_s: float) -> Disk:
        """A disk that does everything at one rate."""
        return cls(bytes_s, bytes_s, bytes_s)

    def seconds(self, read_bytes: float, written_bytes: float) -> float:
        """How long it takes to read and write so much, side by side as long as there is both."""
        both = min(read_bytes, written_bytes)
        alone = (
            2 * both / self.mixed_bytes_s
            + (read_bytes - both) / self.read_bytes_s
            + (written_bytes - both) / self.write_bytes_s
        )
        return alone / self.efficiency


def measure_disk(folder: str | Path, *, nbytes: int = 256 * MIB, request_bytes: int = REQUEST_BYTES) -> Disk:
    """Writes, reads, and does both, ``nbytes`` each, in requests of ``request_bytes``. Takes a second or so.

    By as many threads as a run has.

    Raises:
        ValueError: the folder cannot hold them.
    """
    request_bytes = max(SLOT_ALIGNMENT, request_bytes // SLOT_ALIGNMENT * SLOT_ALIGNMENT)
    disk, mover = DiskFile(folder), Mover()
    try:
        count = max(_SLOTS, nbytes // request_bytes)
        disk.reserve(2 * count * request_bytes)
        slots = _slots(_SLOTS, request_bytes)
        bench = _Bench(disk, mover, slots, request_bytes)
        writes = [(True, number) for number in range(count)]
        reads = [(False, number) for number in range(count)]
        # Half and half: what was written is read, while the other half of the file is written.
        mixed = [pair for number in range(count) for pair in ((False, number), (True, count + number))]
        # A run writes a place for the first time only once, and then it takes up to half longer.
        bench.seconds([(True, number) for number in range(2 * count)])
        rates = [len(work) * request_bytes / bench.seconds(work) for work in (writes, reads, mixed)]
        return Disk(read_bytes_s=rates[1], write_bytes_s=rates[0], mixed_bytes_s=rates[2])
    finally:
        mover.close()
        disk.close()


def _slots(count: int, nbytes: int) -> list[torch.Tensor]:
    raw = torch.zeros(count * nbytes + SLOT_ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % SLOT_ALIGNMENT
    return [raw[start + i * nbytes : start + (i + 1) * nbytes] for i in range(count)]


@dataclass
class _Bench:
    disk: DiskFile
    mover: Mover
    slots: list[torch.Tensor]
    request_bytes: int

    def seconds(self, work: Sequence[tuple[bool, int]]) -> float:
        """Of (is a write, place in the file), as many at once as there are slots."""
        began = time.perf_counter()
        waiting: list[Future[None]] = []
        for number, (write, place) in enumerate(work):
            if len(waiting) == len(self.slots):
                waiting.pop(0).result(timeout=120)
            move, submit = (self.disk.write, self.mover.write) if write else (self.disk.read, self.mover.read)
            slot = self.slots[number % len(self.slots)]
            waiting.append(submit(partial(move, place * self.request_bytes, slot, name=lambda: "probe")))
        for future in waiting:
            future.result(timeout=120)
        return time.perf_counter() - began

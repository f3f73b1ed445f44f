"""Measures a disk as pages use it: direct io on a nameless file, several requests at once."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path

import torch

from megascale_omni.paging.disk import DiskFile
from megascale_omni.paging.layout import MIB
from megascale_omni.paging.mover import Mover

REQUEST_BYTES = 16 * MIB


def measure_disk(folder: str | Path, *, nbytes: int = 256 * MIB, requests: int = 4) -> float:
    """Bytes/s of writing and then reading ``nbytes`` (the slower of the two). Takes a second or so.

    Raises:
        ValueError: the folder cannot hold them.
    """
    disk, mover = DiskFile(folder, checksum="off"), Mover(readers=requests, writers=requests)
    try:
        count = max(requests, nbytes // REQUEST_BYTES)
        disk.reserve(count * REQUEST_BYTES)
        raw = torch.zeros(requests * REQUEST_BYTES + 4096, dtype=torch.uint8)
        start = -raw.data_ptr() % 4096
        slots = [raw[start + i * REQUEST_BYTES : start + (i + 1) * REQUEST_BYTES] for i in range(requests)]
        rates = []
        for write in (True, False):
            began = time.perf_counter()
            waiting: list[Future[None]] = []
            for number in range(count):
                slot = slots[number % requests]
                if len(waiting) == requests:
                    waiting.pop(0).result(timeout=120)
                move, submit = (disk.write, mover.write) if write else (disk.read, mover.read)
                waiting.append(
                    submit(lambda m=move, s=slot, n=number: m(n * REQUEST_BYTES, s, name=lambda: "probe"))  # type: ignore[misc]
                )
            for future in waiting:
                future.result(timeout=120)
            rates.append(count * REQUEST_BYTES / (time.perf_counter() - began))
        return min(rates)
    finally:
        mover.close()
        disk.close()

"""Copies of whole slots between device memory, host memory and disk, as io threads make them.

Without an accelerator a slot is read from and written to disk where it lies. With one, copies run on a stream of their
own; a job returns when its copy has ended, so that the main thread never finds half a page, and a slot that compute
still reads is written only after the reader's event.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from megascale_omni.paging.disk import DiskFile


class Copier:
    """Copies for a device that is ordinary memory."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies a slot to another of the same class."""
        target.copy_(source)

    def from_disk(self, disk: DiskFile, offset: int, target: torch.Tensor, *, name: Callable[[], str]) -> None:
        """Reads a slot from disk."""
        disk.read(offset, target, name=name)

    def to_disk(self, disk: DiskFile, offset: int, source: torch.Tensor, *, name: Callable[[], str]) -> None:
        """Writes a slot to disk."""
        disk.write(offset, source, name=name)


class CudaCopier(Copier):
    """Copies between an accelerator and pinned host memory, on a stream of its own.

    ``reads`` holds, for each slot address, the event of the last kernel that used it; copies wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = threading.local()
        self.reads: dict[int, torch.cuda.Event] = {}

    def _stream(self) -> torch.cuda.Stream:
        stream: torch.cuda.Stream | None = getattr(self._streams, "stream", None)
        if stream is None:
            stream = self._streams.stream = torch.cuda.Stream(self._device)
        return stream

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See :class:`Copier`."""
        stream = self._stream()
        for slot in (source, target):
            event = self.reads.get(slot.data_ptr())
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        stream.synchronize()

    def _staging(self, slot: torch.Tensor) -> torch.Tensor:
        """A pinned buffer of this thread, as large as the slot."""
        buffer: torch.Tensor | None = getattr(self._streams, "staging", None)
        nbytes = slot.numel() * slot.element_size()
        if buffer is None or buffer.numel() < nbytes:
            raw = torch.empty(nbytes + 4096, dtype=torch.uint8, pin_memory=True)
            start = -raw.data_ptr() % 4096
            buffer = self._streams.staging = raw[start : start + nbytes]
        return buffer[:nbytes].view(slot.dtype)

    def from_disk(self, disk: DiskFile, offset: int, target: torch.Tensor, *, name: Callable[[], str]) -> None:
        """See :class:`Copier`; through a pinned buffer."""
        staging = self._staging(target)
        disk.read(offset, staging, name=name)
        self.copy(staging, target)

    def to_disk(self, disk: DiskFile, offset: int, source: torch.Tensor, *, name: Callable[[], str]) -> None:
        """See :class:`Copier`; through a pinned buffer."""
        staging = self._staging(source)
        self.copy(source, staging)
        disk.write(offset, staging, name=name)

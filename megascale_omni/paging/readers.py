"""Pages that a thread other than the main one is reading: they stay where they are until it has their bytes.

Which tier and slot a page has is the main thread's to change. A thread that writes a checkpoint wants bytes wherever
they are at the moment: it says so here, looks, copies, and says that it is done. A move of that page, which would give
its slot to another one, waits for it meanwhile, for the time of a copy. Nobody waits for anybody else's page.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from megascale_omni.paging.disk import PageIoError
from megascale_omni.paging.tiers import TierKind, aligned_empty
from megascale_omni.paging.word_sums import word_sums

if TYPE_CHECKING:
    from megascale_omni.paging.flights import Tiers
    from megascale_omni.paging.table import PageTable

WAIT_SECONDS = 300.0
"""Longest wait for a reader; a disk that takes longer is taken for dead."""


class Readers:
    """The pages being read, each by one thread at most."""

    def __init__(self) -> None:
        self._pages: set[int] = set()
        self._changed = threading.Condition()

    @contextmanager
    def reading(self, page_id: int) -> Iterator[None]:
        """While it is open, the page stays where it is."""
        with self._changed:
            self._pages.add(page_id)
        try:
            yield
        finally:
            with self._changed:
                self._pages.discard(page_id)
                self._changed.notify_all()

    @contextmanager
    def moving(self, page_id: int) -> Iterator[None]:
        """Opens when nobody reads the page; while it is open, nobody begins to read any.

        Raises:
            RuntimeError: a reader has stood still for too long.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: page_id not in self._pages, timeout=WAIT_SECONDS):
                raise RuntimeError(f"page {page_id} has been read for {WAIT_SECONDS:g} s and cannot move")
            yield


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Inside, kernels run on a device: they run on a thread's current one, which is the first one on a new thread."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def copy_of(page_id: int, table: PageTable, tiers: Tiers) -> torch.Tensor:
    """A copy of a page's slot in ordinary memory, at whole blocks, wherever the page is. On any thread.

    For a page that is present and that nobody changes meanwhile. A page on its way is where it comes from.

    Raises:
        PageIoError: it is on disk, and its bytes could not be read, or are not those written; or a device's are not
            those that arrived, where kernels have a checksum.
    """
    slot_class = table.slot_class(page_id)
    copied = aligned_empty((1, slot_class.stride), dtype=slot_class.dtype)[0]
    with table.readers.reading(page_id):
        tier, slot = TierKind(table.tier[page_id]), int(table.slot[page_id])
        if tier is TierKind.DISK:
            assert tiers.disk is not None
            offset = int(table.disk_offset[page_id])
            tiers.disk.read(offset, copied, name=lambda: table.numbering.describe(page_id))
        elif tier is TierKind.ABSENT:
            raise RuntimeError(f"{table.numbering.describe(page_id)} is copied but absent")
        else:
            held = (tiers.device if tier is TierKind.DEVICE else tiers.host).tensor(slot_class, slot)
            if tier is TierKind.DEVICE:
                tiers.copier.arrived(held)
            measured = None
            if tier is TierKind.DEVICE and tiers.checks:
                with launching_on(held.device):
                    measured = tiers.bulk.checksums([held])
            copied.copy_(held)
            if measured is not None and word_sums(copied) != tuple(measured[0].tolist()):
                raise PageIoError(
                    errno.EILSEQ,
                    f"copying the {table.numbering.describe(page_id)} from the device failed: its checksum in host "
                    "memory is not that on the device",
                )
    return copied

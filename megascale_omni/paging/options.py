"""Where pages may go, and the tiers that are made for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from megascale_omni.bulk import Bulk
from megascale_omni.config import Checksum
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.copies import Copier, StreamCopier
from megascale_omni.paging.disk import DiskFile
from megascale_omni.paging.flights import Tiers
from megascale_omni.paging.heap import give_large_blocks_back
from megascale_omni.paging.mover import Mover
from megascale_omni.paging.pinned import cuda_runtime
from megascale_omni.paging.segments import largest_segment
from megascale_omni.paging.streams import CudaStreams
from megascale_omni.paging.tiers import Arena, TierKind
from megascale_omni.paging.upkeep import UpkeepOptions


@dataclass(frozen=True)
class PagingOptions:
    """Where pages may go. Without ``disk_path`` everything stays in the device arena."""

    device_budget: Budget = Budget()  # noqa: RUF009 - frozen
    host_budget: Budget = Budget(nbytes=0)  # noqa: RUF009 - frozen
    disk_path: str | Path | None = None
    checksum: Checksum = "auto"
    prefetch: bool = True
    upkeep: UpkeepOptions = UpkeepOptions()  # noqa: RUF009 - frozen


def tiers_for(
    options: PagingOptions, arena: Arena, *, bulk: Bulk, mover: Mover | None = None, copier: Copier | None = None
) -> Tiers:
    """The places that pages of a device arena can be in; ``mover`` and ``copier`` are others than the usual ones."""
    path, device = options.disk_path, arena.device
    cuda = device.type == "cuda"
    if path is not None and not cuda and options.device_budget.fraction != 1.0:
        give_large_blocks_back()
    disk = None if path is None else DiskFile(path, checksum=options.checksum)
    pin, largest = cuda_runtime() if cuda else None, largest_segment(device)
    host = Arena(device=torch.device("cpu"), kind=TierKind.HOST, pin=pin, largest=largest)
    copier = copier or (StreamCopier(CudaStreams(device), bulk) if cuda else Copier())
    checks = options.checksum != "off"
    return Tiers(arena, host, disk, None if disk is None else mover or Mover(), copier, bulk, checks)

"""Paging options from a configuration, and what memory there is for them."""

from __future__ import annotations

import torch

from megascale_omni.config import PagingConfig, parse_budget
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.paging.memory import HostMemory, local_ranks
from megascale_omni.paging.upkeep import UpkeepOptions

AUTO_SHARE = 0.6
"""Share of the available memory that ``auto`` gives to pages; activations, dense state and the system need the rest."""


def available_host_bytes() -> int:
    """Memory that this process may still take, shared fairly with the other local ranks."""
    free = min(reading.free_bytes for reading in HostMemory().readings())
    return free // local_ranks()


def paging_options(config: PagingConfig, device: torch.device) -> PagingOptions:
    """What a configuration asks for on this machine.

    Raises:
        ValueError: a host budget above the memory there is.
    """
    upkeep = UpkeepOptions(
        emergency_percent=config.emergency_percent,
        compact_percent=config.compact_percent,
        compact_seconds=config.compact_seconds,
    )
    if config.device_budget is None:
        return PagingOptions(upkeep=upkeep)
    host_bytes = available_host_bytes()
    if config.device_budget == "auto":
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_bytes
        device_budget = Budget(nbytes=int(free * AUTO_SHARE))
    else:
        device_budget = parse_budget(config.device_budget, key="paging.device_budget")
    if config.host_budget == "auto":
        host_budget = Budget(nbytes=int(host_bytes * AUTO_SHARE) if device.type == "cuda" else 0)
    else:
        host_budget = parse_budget(config.host_budget, key="paging.host_budget")
    if host_budget.nbytes is not None and host_budget.nbytes > host_bytes:
        raise ValueError(
            f"paging.host_budget={config.host_budget} is more than the {host_bytes} bytes of memory that are "
            "available to this rank; give less, or auto"
        )
    return PagingOptions(
        device_budget=device_budget,
        host_budget=host_budget,
        disk_path=config.disk_path,
        checksum=config.checksum,
        prefetch=config.prefetch != "none",
        upkeep=upkeep,
    )

"""What a run says about its experts: where pages may be when it starts; what they, and tokens, did when it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megascale_omni.paging.manager import ExpertManager


def managers(model: Sequence[torch.nn.Module]) -> list[ExpertManager]:
    """This rank's page managers; none where experts are stock's."""
    from megascale_omni.experts.module import PagedExperts

    modules = (module for chunk in model for module in chunk.modules() if isinstance(module, PagedExperts))
    return list(dict.fromkeys(module.manager for module in modules))


def places(model: Sequence[torch.nn.Module]) -> dict[str, object] | None:
    """Pages of this rank, and the memory and the folder that they may be in; None for stock."""
    found = managers(model)
    if not found:
        return None
    disks = [manager.pager.tiers.disk for manager in found]
    state = sum(
        module.entry.num_pages * module.slot_class(plane).nbytes
        for manager in found
        for module in manager.modules
        for plane in module.dtypes
    )
    result: dict[str, object] = {"state_bytes": state, "device_bytes": _limit(found)}
    folders = [str(disk.folder) for disk in disks if disk is not None]
    return {**result, "disk_path": folders[0]} if folders else result


def _limit(found: Sequence[ExpertManager]) -> int | str:
    """Bytes that pages may have in the device arena; `all` where none ever leaves."""
    total = 0
    for manager in found:
        for slot_class in manager.arena.slot_classes():
            limit = manager.arena.limit(slot_class)
            if limit is None:
                return "all"
            total += limit * slot_class.nbytes
    return total


def counters(model: Sequence[torch.nn.Module]) -> dict[str, int] | None:
    """Pages and bytes that moved on this rank since the start; None for stock or where no page can leave."""
    moving = [manager for manager in managers(model) if manager.pager.can_evict]
    if not moving:
        return None
    total: Counter[str] = Counter()
    for manager in moving:
        total.update(manager.stats())
    return dict(sorted(total.items()))


def groups(model: Sequence[torch.nn.Module]) -> dict[str, float] | None:
    """What the groups dispatchers of this rank did since the start; None where there are none."""
    from megascale_omni.groups.dispatch import GroupDispatcher, total_stats

    found = (getattr(getattr(m, "token_dispatcher", None), "core", None) for chunk in model for m in chunk.modules())
    return total_stats(core.stats() for core in found if isinstance(core, GroupDispatcher))

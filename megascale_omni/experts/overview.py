"""What a model's paged experts are, and what their pages did, in a line that a person reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megascale_omni.experts.module import PagedExperts
from megascale_omni.paging.layout import MIB
from megascale_omni.paging.manager import ExpertManager


def paged_experts(model: Iterable[torch.nn.Module]) -> list[PagedExperts]:
    """The paged experts in all chunks of ``model``, each once."""
    found = (module for chunk in model for module in chunk.modules() if isinstance(module, PagedExperts))
    return list(dict.fromkeys(found))


def managers(model: Iterable[torch.nn.Module]) -> list[ExpertManager]:
    """This rank's page managers; none where experts are stock's."""
    return list(dict.fromkeys(experts.manager for experts in paged_experts(model)))


@dataclass(frozen=True)
class Overview:
    """Experts of this rank: how many layers, experts and pages (a page with all its planes), bytes of all planes, bytes
    that they may have in the device arena (None: all), and the folder of the scratch file.
    """

    layers: int
    experts: int
    pages: int
    state_bytes: int
    device_bytes: int | None
    disk_path: str | None

    @classmethod
    def of(cls, model: Iterable[torch.nn.Module]) -> Overview | None:
        """Of the paged experts in all chunks of ``model``; None where there are none."""
        found = paged_experts(model)
        if not found:
            return None
        owners = list(dict.fromkeys(experts.manager for experts in found))
        pages = [module for owner in owners for module in owner.modules]
        disks = [owner.pager.tiers.disk for owner in owners]
        return cls(
            layers=len(found),
            experts=sum(experts.num_experts for experts in found),
            pages=sum(module.entry.num_pages for module in pages),
            state_bytes=sum(
                module.entry.num_pages * module.slot_class(plane).nbytes for module in pages for plane in module.dtypes
            ),
            device_bytes=_limit(owners),
            disk_path=next((str(disk.folder) for disk in disks if disk is not None), None),
        )

    def record(self) -> dict[str, int | str]:
        """For a file of metrics; None is "all" in ``device_bytes`` and left out in ``disk_path``."""
        values = {**asdict(self), "device_bytes": "all" if self.device_bytes is None else self.device_bytes}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Overview:
        """What :meth:`record` gave."""
        device_bytes = None if record["device_bytes"] == "all" else record["device_bytes"]
        return cls(**{"disk_path": None, **record, "device_bytes": device_bytes})

    def __str__(self) -> str:
        where = "all in memory"
        if self.device_bytes is not None:
            behind = "host memory" if self.disk_path is None else self.disk_path
            where = f"{self.device_bytes / MIB:,.1f} MiB of it in device memory, the rest in {behind}"
        counted = ((self.experts, "expert"), (self.layers, "layer"), (self.pages, "page"))
        experts, layers, pages = (f"{number:,} {word}{'s' * (number != 1)}" for number, word in counted)
        return f"{experts} of {layers} in {pages}, {self.state_bytes / MIB:,.1f} MiB with optimizer state: {where}"


def announce(model: Iterable[torch.nn.Module], *, rank: int, world: int) -> bool:
    """Prints what of ``model`` is in pages on this rank; False, and no line, where nothing is."""
    overview = Overview.of(model)
    if overview is not None:
        print(f"megascale: {overview}" + ("" if world == 1 else f" (rank {rank} of {world})"), flush=True)
    return overview is not None


def _limit(owners: Iterable[ExpertManager]) -> int | None:
    total = 0
    for owner in owners:
        for slot_class in owner.arena.slot_classes():
            limit = owner.arena.limit(slot_class)
            if limit is None:
                return None
            total += limit * slot_class.nbytes
    return total


def counters(model: Iterable[torch.nn.Module]) -> dict[str, int] | None:
    """Pages and bytes that moved on this rank since the start; None for stock or where no page can leave."""
    moving = [owner for owner in managers(model) if owner.pager.can_evict]
    if not moving:
        return None
    total: Counter[str] = Counter()
    for owner in moving:
        total.update(owner.stats())
    return dict(sorted(total.items()))


def in_words(counts: Mapping[str, int]) -> str:
    """``counts`` (see :func:`counters`) as a person reads them."""
    loaded, faults = counts.get("pages_loaded", 0), counts.get("page_faults", 0)
    waited = counts.get("stall_microseconds", 0) / 1e6
    parts = [
        f"{loaded:,} pages came ({counts.get('bytes_loaded', 0) / MIB:,.1f} MiB), {faults:,} of them late",
        f"{counts.get('pages_evicted', 0):,} left ({counts.get('bytes_written', 0) / MIB:,.1f} MiB written)",
        f"{waited:,.1f} s waited for pages",
    ]
    return ", ".join(parts)

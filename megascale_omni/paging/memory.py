"""How much memory is free: of a device, or of the machine as far as this process may have it.

[Note: free memory]
On an accelerator free is what the driver would still give, and what the allocator has taken from it and nobody uses.
Without one it is what this process can still take before something ends it: the system's estimate of available memory,
what each control group above the process leaves (page cache that can be given up counts as free), and what the
process's own limits of data and address space leave. The smallest share counts. All but the last the local ranks share:
where all of them find that some is missing, each gives back its part.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class FreeMemory:
    """Bytes that are free, of ``total_bytes``. So many processes like this one (``sharers``) share them."""

    free_bytes: int
    total_bytes: int
    sharers: int = 1

    @property
    def share(self) -> float:
        """What is free of all."""
        return self.free_bytes / max(1, self.total_bytes)


MemoryProbe = Callable[[], FreeMemory]
"""Tells what is free now."""

_CGROUPS = Path("/sys/fs/cgroup")
_V1_UNLIMITED = 1 << 60
"""Control groups of the first version write a number above this where there is no limit."""


def local_ranks() -> int:
    """Processes of this run on this machine, as launchers say."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def probe_for(device: torch.device) -> MemoryProbe:
    """What tells the free memory of a device; of the process where the device is a CPU."""
    return HostMemory() if device.type == "cpu" else lambda: free_device_memory(device)


def free_device_memory(device: torch.device) -> FreeMemory:
    """Of an accelerator, see [Note: free memory]."""
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return FreeMemory(free + unused, total)


class HostMemory:
    """Tells the free memory of this process, see [Note: free memory]. Finds once which control groups have limits."""

    def __init__(self) -> None:
        self._groups = [group for group in _groups() if _limit(group) is not None]

    def __call__(self) -> FreeMemory:
        """What is free now, where it is scarcest."""
        return min(self.readings(), key=lambda memory: memory.share)

    def readings(self) -> list[FreeMemory]:
        """What each of those that limit the process leaves it."""
        found = [*_of_system(), *(m for g in self._groups if (m := _of_group(g)) is not None), *_of_limits()]
        if found:
            return found
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return [FreeMemory(total, total)]


def _of_system() -> Iterator[FreeMemory]:
    values = _table("/proc/meminfo", ("MemTotal", "MemAvailable"))
    if len(values) == 2:
        yield FreeMemory(values["MemAvailable"], values["MemTotal"], local_ranks())


@dataclass(frozen=True)
class _Group:
    """A control group: files of its limit and of what it uses, and the name of the cache that can be given up."""

    folder: Path
    limit: str
    used: str
    cache: str


def _limit(group: _Group) -> int | None:
    found = lines(group.folder / group.limit)
    number = int(found[0]) if found and found[0].isdigit() else _V1_UNLIMITED
    return number if number < _V1_UNLIMITED else None


def _of_group(group: _Group) -> FreeMemory | None:
    most, now = _limit(group), lines(group.folder / group.used)
    if most is None or not now:
        return None
    cache = [line.split()[1] for line in lines(group.folder / "memory.stat") if line.startswith(f"{group.cache} ")]
    return FreeMemory(max(0, most - int(now[0]) + sum(map(int, cache))), most, local_ranks())


def _groups() -> Iterator[_Group]:
    """Every control group that holds the process, of either version."""
    names = [line.split(":", 2) for line in lines("/proc/self/cgroup") if line.count(":") >= 2]
    paths = {controllers: name.lstrip("/") for _, controllers, name in names}
    first = next((path for controllers, path in paths.items() if "memory" in controllers.split(",")), "")
    for root, name, files in (
        (_CGROUPS, paths.get("", ""), ("memory.max", "memory.current", "inactive_file")),
        (_CGROUPS / "memory", first, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ):
        place = root / name
        for folder in (place, *place.parents):
            yield _Group(folder, *files)
            if folder == root:
                break


_LIMITS = {"VmData": resource.RLIMIT_DATA, "VmSize": resource.RLIMIT_AS}


def _of_limits() -> Iterator[FreeMemory]:
    """Of the limits that the process was given (``ulimit``): allocations beyond them fail."""
    limits = {name: resource.getrlimit(kind)[0] for name, kind in _LIMITS.items()}
    limits = {name: most for name, most in limits.items() if most != resource.RLIM_INFINITY}
    used = _table("/proc/self/status", tuple(limits)) if limits else {}
    for name, bytes_used in used.items():
        yield FreeMemory(max(0, limits[name] - bytes_used), limits[name])


def _table(path: str, names: tuple[str, ...]) -> dict[str, int]:
    """Of lines ``name: number kB`` those of these names, in bytes."""
    words = (line.split() for line in lines(path) if line.startswith(names))
    return {w[0][:-1]: int(w[1]) * 1024 for w in words if w[0][:-1] in names}


def lines(path: str | Path) -> list[str]:
    """Lines of a file; none where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []

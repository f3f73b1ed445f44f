"""``megascale env``: on what a run stands."""

import argparse
import json
import os
import platform
from collections.abc import Iterable
from importlib import metadata
from typing import TypedDict

NAME = "env"
HELP = "print versions of packages, processor, memory and accelerators"

PACKAGES = (
    "megascale",
    "torch",
    "numpy",
    "megatron-core",
    "deepspeed",
    "transformers",
    "triton",
    "transformer-engine",
)


class Environment(TypedDict):
    """On what a run stands. What cannot be found out is None.

    ``packages``: name -> version, None where not installed; ``cpu``: ``model``, ``cores`` that this process may use;
    ``memory``: ``total_bytes``, ``available_bytes``, ``limit_bytes`` (of the control group; None: none);
    ``gpus``: ``name``, ``memory_bytes``, ``capability`` of each.
    """

    python: str
    platform: str
    packages: dict[str, str | None]
    cpu: dict[str, str | int | None]
    memory: dict[str, int | None]
    gpus: list[dict[str, str | int]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--json``: one JSON object instead of lines to read."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the environment; returns 0."""
    found = environment()
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_lines(found)))
    return 0


def environment() -> Environment:
    """Versions and hardware as this process sees them, ready for JSON."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": {"model": _cpu_model(), "cores": len(os.sched_getaffinity(0))},
        "memory": _memory(),
        "gpus": _gpus(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _read_lines(path: str) -> list[str]:
    """Lines of a file of the kernel, none where this system has no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().splitlines()
    except OSError:
        return []


def _cpu_model() -> str | None:
    for line in _read_lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or None


def _memory() -> dict[str, int | None]:
    kib = {key: value.split()[0] for key, _, value in (line.partition(":") for line in _read_lines("/proc/meminfo"))}
    limits = _read_lines("/sys/fs/cgroup/memory.max") or _read_lines("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    total = int(kib["MemTotal"]) * 1024 if "MemTotal" in kib else None
    available = int(kib["MemAvailable"]) * 1024 if "MemAvailable" in kib else None
    limit = int(limits[0]) if limits and limits[0].isdigit() else None
    if limit is not None and total is not None and limit >= total:  # version 1 writes "no limit" as a huge number
        limit = None
    return {"total_bytes": total, "available_bytes": available, "limit_bytes": limit}


def _gpus() -> list[dict[str, str | int]]:
    import torch

    found: list[dict[str, str | int]] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        found.append({"name": properties.name, "memory_bytes": properties.total_memory, "capability": capability})
    return found


def _lines(found: Environment) -> Iterable[str]:
    def flat(prefix: str, value: object) -> Iterable[tuple[str, str]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from flat(f"{prefix}.{key}" if prefix else str(key), inner)
        elif isinstance(value, list):
            if not value:
                yield prefix, "none"
            for index, inner in enumerate(value):
                yield from flat(f"{prefix}.{index}", inner)
        elif value is None:
            yield prefix, "not installed" if prefix.startswith("packages.") else "none"
        elif prefix.endswith("_bytes") and isinstance(value, int):
            yield prefix.removesuffix("_bytes"), f"{value / 2**30:.1f} GiB"
        else:
            yield prefix, str(value)

    rows = list(flat("", found))
    width = max(len(name) for name, _ in rows)
    return (f"{name:<{width}}  {value}" for name, value in rows)

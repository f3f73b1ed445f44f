"""Measures what links between the ranks of a running job carry, and writes down where the ranks are."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist

from megascale_omni.topology.levels import Level, Node, Topology

_LARGE_BYTES = 16 * 2**20
_REPETITIONS = 5
_FASTEST = 1e12


def probe(
    host: str, units: Mapping[str, str] | None = None, *, inside: str = "device", around: str = "cluster"
) -> tuple[Topology, list[str]]:
    """The topology of the default group's ranks, the same on each, and the levels of which no pair was there.

    ``units``: what this rank's machine is in, narrowest first, e.g. ``{"rack": "a"}``. A level that no two ranks share
    gets the figures of the next narrower one. A collective.

    Raises:
        ValueError: one rank only, ranks of one host that are not numbered one after the other, or ranks that name other
            levels.
    """
    if dist.get_world_size() == 1:
        raise ValueError(
            "one rank has no links to measure; start two or more, on every machine that is to be in the file"
        )
    rank, device = dist.get_rank(), torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    told: list[tuple[str, dict[str, str]]] = [("", {})] * dist.get_world_size()
    dist.all_gather_object(told, (host, dict(units or {})))
    names = [inside, *told[0][1], around]
    nodes: list[Node] = []
    for number, (name, of_node) in enumerate(told):
        if [inside, *of_node, around] != names:
            raise ValueError(f"rank {number} is in {of_node}, rank 0 in {told[0][1]}: name the same levels everywhere")
        if nodes and nodes[-1].host == name:
            nodes[-1] = Node(name, nodes[-1].ranks + 1, of_node)
        elif name in [node.host for node in nodes]:
            raise ValueError(f"ranks of host {name} are not numbered one after the other; start them node by node")
        else:
            nodes.append(Node(name, 1, of_node))
    where = Topology(tuple(Level(name, 1.0) for name in names), tuple(nodes))
    level_PP = where.level_PP()
    levels: list[Level] = []
    missing: list[str] = []
    for number, name in enumerate(names):
        pairs = [(int(a), int(b)) for a, b in zip(*(level_PP == number).nonzero(), strict=True) if a < b]
        if pairs:
            levels.append(_measured(name, pairs[0], rank, device))
        else:
            missing.append(name)
            levels.append(Level(name, levels[-1].bandwidth, levels[-1].latency_seconds) if levels else Level(name, 0.1))
    if inside in missing:  # no two ranks share a host: nothing narrower was measured
        first = next((level for level in levels if level.name not in missing), Level("", _FASTEST))
        levels = [
            Level(level.name, first.bandwidth, first.latency_seconds) if level.name in missing else level
            for level in levels
        ]
    return Topology(tuple(levels), tuple(nodes)), missing


def _measured(name: str, pair: tuple[int, int], rank: int, device: torch.device) -> Level:
    """Bandwidth and latency between two ranks, told to all."""
    found = torch.zeros(2, dtype=torch.float64, device=device)
    if rank in pair:
        small = _round_trip(torch.zeros(1, device=device), pair, rank) / 2
        large = _round_trip(torch.zeros(_LARGE_BYTES // 4, device=device), pair, rank) / 2
        found[0], found[1] = _LARGE_BYTES / max(large - small, _LARGE_BYTES / _FASTEST), small
    dist.broadcast(found, src=pair[0])
    return Level(name, float(found[0]), float(found[1]))


def _round_trip(message: torch.Tensor, pair: tuple[int, int], rank: int) -> float:
    """Median seconds of there and back."""
    seconds = []
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        if rank == pair[0]:
            dist.send(message, pair[1])
            dist.recv(message, pair[1])
        else:
            dist.recv(message, pair[0])
            dist.send(message, pair[0])
        if message.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])

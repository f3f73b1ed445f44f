"""What ``megascale topology simulate`` says: every distinct group of a job, simulated and added up."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megascale_omni.groups.plan import PAGE_BATCH
from megascale_omni.topology.levels import Topology
from megascale_omni.topology.placement import Placement, Slots
from megascale_omni.topology.routing import Choices, read_record, records_of, synthetic
from megascale_omni.topology.simulate import DISPATCHERS, LayerShape, Simulated, simulate

_MOST_ENTRIES = 1 << 28
"""Of a routing map, of what all ranks of a group chose, of what they send each other: some GiB."""


def simulate_and_print(args: argparse.Namespace) -> int:
    """The command; returns 0."""
    found = simulate_job(args)
    print(json.dumps(found, indent=1) if args.json else "\n".join(lines_of(found)))
    return 0


def simulate_job(args: argparse.Namespace) -> dict[str, object]:
    """All groups of a job: bytes of one layer's forward and backward, and seconds of its slowest group.

    Groups are ranks in a row, as Megatron numbers them. Those that lie alike among the levels are simulated once.

    Raises:
        ValueError: sizes that do not divide each other, or more ranks than the topology has.
    """
    topology = _topology(args)
    ranks, size = args.ranks or topology.num_ranks, args.expert_parallel
    if size < 1 or ranks % size or ranks > topology.num_ranks:
        raise ValueError(
            f"{ranks} ranks in groups of {size} on a topology of {topology.num_ranks}: choose a divisor "
            "(--expert-parallel), and no more ranks than there are (--ranks)"
        )
    _check_sizes(args, size)
    choices, experts = _choices(args, size)
    width = {"bf16": 2, "fp32": 4}[args.dtype]
    shape = LayerShape(args.hidden, experts, 3 * args.ffn * args.hidden, width=width)
    slots = _slots(args, size, experts)
    alike = _alike(topology, ranks, size)
    dispatchers: dict[str, dict[str, object]] = {}
    for name in DISPATCHERS:
        total, slowest, bytes_by_level = 0, 0.0, dict.fromkeys((level.name for level in topology.levels), 0)
        found = None if name == "groups" else simulate(name, choices, shape)
        for members, count in alike:
            links = topology.link_costs(members)
            one = found or simulate(
                name, choices, shape, slots=slots, move=args.move, discovery=args.discovery, links=links
            )
            total += count * one.total_bytes
            slowest = max(slowest, one.seconds(topology, members))
            for level, nbytes in one.bytes_by_level(topology, members).items():
                bytes_by_level[level] += count * nbytes
            paged = _experts_that_travel(one)
        dispatchers[name] = {"bytes": total, "bytes_by_level": bytes_by_level, "seconds": slowest}
    dispatchers["groups"]["experts_that_travel"] = paged
    better = {key: min(float(dispatchers[n][key]) for n in DISPATCHERS[:2]) for key in ("bytes", "seconds")}  # type: ignore[arg-type]
    return {
        "ranks": ranks,
        "expert_parallel": size,
        "experts": experts,
        "tokens": max(chosen.tokens for chosen in choices),
        "hidden": args.hidden,
        "dtype": args.dtype,
        "routing": args.routing,
        "dispatchers": dispatchers,
        "groups_over_better_stock": {
            key: float(dispatchers["groups"][key]) / value if value else None  # type: ignore[arg-type]
            for key, value in better.items()
        },
    }


def _experts_that_travel(found: Simulated) -> int:
    return 0 if found.plan is None else len(found.plan.moves)


def _topology(args: argparse.Namespace) -> Topology:
    if args.topology is not None:
        return Topology.from_file(args.topology)
    if not args.ranks or args.ranks < 1:
        raise ValueError(f"--ranks={args.ranks}: give a number of ranks, or a --topology")
    return Topology.uniform(args.ranks)


def _check_sizes(args: argparse.Namespace, size: int) -> None:
    """Raises ValueError for a layer without neurons, and for tables that no memory holds, before they are made."""
    if min(args.hidden, args.ffn) < 1:
        raise ValueError(f"--hidden={args.hidden}, --ffn={args.ffn}: a layer has 1 or more of each")
    batches = -(-args.experts // PAGE_BATCH) if args.move == "pages" else 0
    for entries, what in (
        (args.tokens * args.experts, "--tokens x --experts"),
        (args.tokens * args.topk * size, "--tokens x --topk x --expert-parallel"),
        (size * size * (8 + 3 * batches), "--expert-parallel squared, for each exchange"),
    ):
        if entries > _MOST_ENTRIES:
            raise ValueError(f"{what}: {entries:,} numbers are more than the {_MOST_ENTRIES:,} that fit; choose less")


def _choices(args: argparse.Namespace, size: int) -> tuple[list[Choices], int]:
    """What each rank of a group chose, and of how many experts."""
    if args.routing in ("uniform", "zipf", "clusters"):
        if not 1 <= args.topk <= args.experts or args.tokens < 1:
            raise ValueError(
                f"--topk={args.topk} must be 1 to --experts={args.experts}, --tokens={args.tokens} 1 or more"
            )
        maps = (
            synthetic(args.routing, tokens=args.tokens, experts=args.experts, topk=args.topk, seed=args.seed + rank)
            for rank in range(size)
        )
        return [Choices.of_map(map_TE) for map_TE in maps], args.experts
    last: list[np.ndarray] = []
    for path in _first(records_of(args.routing), size, args.routing):
        of_layer = [record.map_TE for record in read_record(path) if record.layer == args.layer]
        if not of_layer:
            raise ValueError(f"{path} has nothing of layer {args.layer}; choose another --layer")
        last.append(of_layer[-1])
    return [Choices.of_map(map_TE) for map_TE in last], last[0].shape[1]


def _first(paths: Sequence[Path], size: int, folder: str) -> Sequence[Path]:
    if len(paths) < size:
        raise ValueError(f"{folder} has the record of {len(paths)} ranks, a group has {size}; lower --expert-parallel")
    return paths[:size]


def _slots(args: argparse.Namespace, size: int, experts: int) -> Slots | None:
    if args.placement is None:
        return None
    slots = Placement.from_file(args.placement).of_layer(args.layer)
    if slots is not None and (len(slots), len(slots) * len(slots[0])) != (size, experts):
        raise ValueError(f"--placement={args.placement} is for {len(slots)} ranks of {len(slots[0])} experts each")
    return slots


def _alike(topology: Topology, ranks: int, size: int) -> list[tuple[range, int]]:
    """One group of each way to lie among the levels, and how many there are."""
    found: dict[bytes, tuple[range, int]] = {}
    for start in range(0, ranks, size):
        members = range(start, start + size)
        key = topology.level_PP(members).tobytes()
        first, count = found.get(key, (members, 0))
        found[key] = first, count + 1
    return list(found.values())


def lines_of(found: dict[str, object]) -> list[str]:
    """For a person."""
    lines = [
        f"{found['ranks']} ranks in groups of {found['expert_parallel']}, {found['tokens']} tokens a rank, "
        f"{found['experts']} experts, {found['routing']} routing: one layer, forward and backward"
    ]
    dispatchers = found["dispatchers"]
    assert isinstance(dispatchers, dict)
    for name, one in dispatchers.items():
        levels = ", ".join(f"{level} {nbytes / 1e9:.3f}" for level, nbytes in one["bytes_by_level"].items())
        lines.append(f"  {name}: {one['bytes'] / 1e9:.3f} GB ({levels}), {1e3 * one['seconds']:.3f} ms")
    ratios = found["groups_over_better_stock"]
    assert isinstance(ratios, dict)
    lines += [f"  groups / the better stock dispatcher, {key}: {value:.3f}" for key, value in ratios.items() if value]
    return lines

"""``megascale topology``: where ranks are, which rank keeps which expert, and what would travel."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megascale_omni.topology.levels import Topology

NAME = "topology"
HELP = "measure links, place experts, add nodes, simulate what travels"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One parser for each of the five."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    _probe_arguments(actions.add_parser("probe", help="measure links between the ranks of a torchrun job"))
    _plan_arguments(actions.add_parser("plan", help="place experts by what routers chose"))
    _recompile_arguments(actions.add_parser("recompile", help="add a node"))
    show = actions.add_parser("show", help="print a topology and its expert-parallel groups")
    show.add_argument("topology", metavar="FILE")
    show.add_argument("--expert-parallel", type=int, metavar="N", help="ranks of a group")
    _simulate_arguments(actions.add_parser("simulate", help="bytes and seconds of a layer's exchanges at any size"))


def _probe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", required=True, metavar="FILE", help="YAML, or JSON where the name ends so")
    parser.add_argument("--in", dest="units", action="append", default=[], metavar="LEVEL=UNIT", help="e.g. rack=a")


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--routing", required=True, metavar="DIR", help="what --megascale-routing wrote")
    parser.add_argument("--expert-parallel", required=True, type=int, metavar="N", help="ranks of a group")
    parser.add_argument("--topology", metavar="FILE", help="default: all links alike")
    parser.add_argument("--placement", metavar="FILE", help="the placement so far; what can stays")
    parser.add_argument("--output", required=True, metavar="FILE", help="for --megascale-placement")


def _recompile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--existing-topology", required=True, metavar="FILE")
    parser.add_argument("--new-node-ip", required=True, metavar="HOST")
    parser.add_argument("--new-node-gpu-count", required=True, type=int, metavar="N")
    parser.add_argument("--new-node-in", action="append", default=[], metavar="LEVEL=UNIT", help="e.g. rack=a")
    parser.add_argument("--output", metavar="FILE", help="default: the existing file is replaced")


def _simulate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, metavar="N", help="of the job (default: those of the topology)")
    parser.add_argument("--expert-parallel", type=int, default=8, metavar="N", help="ranks of a group (default 8)")
    parser.add_argument("--topology", metavar="FILE", help="default: nodes of 8 ranks, racks of 8 nodes")
    parser.add_argument("--placement", metavar="FILE", help="of the groups dispatcher (default: experts by number)")
    parser.add_argument("--layer", type=int, default=1, metavar="N", help="of placement and record (default 1)")
    parser.add_argument(
        "--routing", default="uniform", metavar="uniform|zipf|clusters|DIR", help="made up, or a run's record"
    )
    parser.add_argument("--tokens", type=int, default=1024, metavar="N", help="of a rank (default 1024)")
    parser.add_argument("--experts", type=int, default=64, metavar="N", help="of a layer (default 64)")
    parser.add_argument("--topk", type=int, default=8, metavar="N", help="experts a token (default 8)")
    parser.add_argument("--hidden", type=int, default=4096, metavar="N", help="elements of a token (default 4096)")
    parser.add_argument("--ffn", type=int, default=1536, metavar="N", help="neurons of an expert (default 1536)")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--move", choices=["auto", "tokens", "pages"], default="auto")
    parser.add_argument("--discovery", choices=["allgather", "gossip"], default="allgather")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Does it; returns 0."""
    if args.action == "probe":
        return _probe(args)
    if args.action == "plan":
        return _plan(args)
    if args.action == "recompile":
        return _recompile(args)
    if args.action == "show":
        from megascale_omni.topology.levels import Topology

        print("\n".join(describe(Topology.from_file(args.topology), args.expert_parallel)))
        return 0
    from megascale_omni.topology import report

    return report.simulate_and_print(args)


def _probe(args: argparse.Namespace) -> int:
    import os
    import socket

    import torch
    import torch.distributed as dist

    from megascale_omni.topology.probe import probe

    if "RANK" not in os.environ:
        raise ValueError(
            "topology probe measures between ranks: start it with torchrun, e.g. "
            "torchrun --nproc-per-node 8 --no-python megascale topology probe --output topology.yaml"
        )
    if os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here: no port is opened to the outside
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        found, missing = probe(socket.gethostname(), _units(args.units, "--in"))
        if dist.get_rank() == 0:
            found.write(args.output)
            print("\n".join(describe(found, None)))
            for name in missing:
                print(f"no two ranks are joined by level {name} only: its figures are those of the next one")
            print(f"written: {args.output}")
    finally:
        if own:
            dist.destroy_process_group()
    return 0


def _plan(args: argparse.Namespace) -> int:
    from megascale_omni.topology.levels import Topology
    from megascale_omni.topology.placement import Placement
    from megascale_omni.topology.planning import plan_layers

    topology = None if args.topology is None else Topology.from_file(args.topology)
    before = None if args.placement is None else Placement.from_file(args.placement)
    planned = plan_layers(args.routing, ranks=args.expert_parallel, topology=topology, before=before)
    for layer in planned:
        print(
            f"layer {layer.number}: {layer.trips_before:.3f} trips a token to other ranks, "
            f"{layer.trips_after:.3f} as placed; {layer.moves} experts move"
        )
    Placement({str(layer.number): layer.slots for layer in planned}).write(args.output, ranks=args.expert_parallel)
    print(f"written: {args.output}")
    return 0


def _recompile(args: argparse.Namespace) -> int:
    from megascale_omni.topology.recompile import recompile_nccl_topology

    found = recompile_nccl_topology(
        args.existing_topology,
        new_node_ip=args.new_node_ip,
        new_node_gpu_count=args.new_node_gpu_count,
        new_node_units=_units(args.new_node_in, "--new-node-in"),
    )
    path = args.output or args.existing_topology
    found.write(path)
    print("\n".join(describe(found, None)))
    print(f"written: {path}; plan a placement for the new ranks with `megascale topology plan`")
    return 0


def _units(given: list[str], flag: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in given]
    for level, equals, unit in pairs:
        if not (level and equals and unit):
            raise ValueError(f"{flag} {level}{equals}{unit} is not LEVEL=UNIT, e.g. rack=a")
    return {level: unit for level, _, unit in pairs}


def describe(topology: Topology, group: int | None) -> list[str]:
    """A topology in lines; with ``group``, how many groups of so many ranks are inside each level."""
    from megascale_omni.topology.placement import groups_by_level

    ranks, nodes = topology.num_ranks, len(topology.nodes)
    lines = [f"{ranks} rank{'s' * (ranks != 1)} on {nodes} node{'s' * (nodes != 1)}"]
    for number, level in enumerate(topology.levels):
        units = len(set(topology.units_of(number, range(topology.num_ranks)).tolist()))
        latency, several = f"{1e6 * level.latency_seconds:.1f} us", "s" * (units != 1)
        lines.append(f"  {level.name}: {level.bandwidth / 1e9:.3g} GB/s a rank, {latency}, {units} unit{several}")
    if group is not None:
        best = groups_by_level(topology, group)
        in_order = [range(i, i + group) for i in range(0, topology.num_ranks, group)]
        for level in topology.levels:
            now = sum(_widest(topology, ranks) == level.name for ranks in in_order)
            could = sum(name == level.name for _, name in best)
            lines.append(f"  groups of {group} inside {level.name}: {now} of ranks in a row, {could} at best")
    return [*lines, *topology.doubts]


def _widest(topology: Topology, ranks: range) -> str:
    return topology.levels[max(0, int(topology.level_PP(ranks).max()))].name

"""A topology with more nodes, and what its placement moves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megascale_omni.topology.levels import Node, Topology


def recompile_nccl_topology(
    existing_topology: Topology | str | Path,
    *,
    new_node_ip: str,
    new_node_gpu_count: int,
    new_node_units: Mapping[str, str] | None = None,
) -> Topology:
    """The topology with one more node at its end; ranks that were there keep their numbers.

    ``new_node_units``: what the node is in, by level; a level that is left out is a unit of its own.

    Raises:
        ValueError: the node is there already, has no ranks, or names a level that there is not.
    """
    old = existing_topology if isinstance(existing_topology, Topology) else Topology.from_file(existing_topology)
    units = {level.name: f"{level.name} of {new_node_ip}" for level in old.levels[1:-1]} | dict(new_node_units or {})
    return old.with_nodes([Node(new_node_ip, new_node_gpu_count, units)])

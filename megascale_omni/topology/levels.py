"""Where ranks are: nodes, what encloses them, and what each level's links carry. Read from and written to YAML or JSON.

    levels:                                   # innermost first; the first is inside a node, the last holds everything
      - {name: device, bandwidth: 450 GB/s, latency: 2us}
      - {name: rack, bandwidth: 50 GB/s, latency: 5us}
      - {name: cluster, bandwidth: 16 GB/s, latency: 10us}
    nodes:                                    # ranks are numbered in this order
      - {host: 10.0.0.1, ranks: 8, in: {rack: a}}
      - {host: 10.0.0.2, ranks: 8, in: {rack: b}}

A bandwidth is what one rank may send (and receive at the same time) over links of that level.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from megascale_omni.topology.links import LinkCosts

_BANDWIDTHS = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"\s*(\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*"


_MUCH = 1.25
"""By how much a wider level must be faster to be doubted: probes differ by less."""

MAX_RANKS = 1 << 20
"""Ranks of a topology: more than any job has, few enough to make tables of."""


@dataclass(frozen=True)
class Level:
    """Links between ranks that have nothing narrower in common. Bandwidth in bytes a second and rank."""

    name: str
    bandwidth: float
    latency_seconds: float = 0.0


@dataclass(frozen=True)
class Node:
    """A machine with ``ranks`` ranks. ``units``: what it is in, by the name of each level between first and last."""

    host: str
    ranks: int
    units: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Topology:
    """Levels, innermost first, and nodes in the order of their ranks.

    Raises:
        ValueError: no levels or nodes, names twice, a bandwidth that is not positive, a node that does not say what it
        is in.
    """

    levels: tuple[Level, ...]
    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        names = [level.name for level in self.levels]
        if len(names) < 2 or len(set(names)) != len(names):
            raise ValueError(f"topology levels={names} must be two or more names, innermost first, none twice")
        hosts = [node.host for node in self.nodes]
        if not hosts or len(set(hosts)) != len(hosts):
            raise ValueError(f"topology nodes={hosts} must be one or more hosts, none twice")
        for level in self.levels:
            if not 0 < level.bandwidth < math.inf or not 0 <= level.latency_seconds < math.inf:
                raise ValueError(
                    f"topology level {level.name}: bandwidth={level.bandwidth:g} must be above 0 and "
                    f"latency={level.latency_seconds:g} not below, both finite"
                )
        for node in self.nodes:
            if node.ranks < 1:
                raise ValueError(f"topology node {node.host}: ranks={node.ranks} must be 1 or more")
            if node.units and not names[1:-1]:
                raise ValueError(
                    f"topology node {node.host}: in={dict(node.units)}, but between {names[0]}, which is the node, and "
                    f"{names[-1]}, which holds everything, there is no level; add one, or leave this out"
                )
            if set(node.units) != set(names[1:-1]):
                raise ValueError(
                    f"topology node {node.host}: in={dict(node.units)} must say which unit of {names[1:-1]} it is in"
                )
        if self.num_ranks > MAX_RANKS:
            raise ValueError(f"topology of {self.num_ranks} ranks: {MAX_RANKS} are the most that can be looked at")

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return sum(node.ranks for node in self.nodes)

    @property
    def doubts(self) -> list[str]:
        """What may be meant otherwise, a sentence each: levels whose links are faster than those inside them."""
        return [
            f"level {outer.name} is faster than {inner.name}, which is inside it; are levels listed innermost first?"
            for inner, outer in itertools.pairwise(self.levels)
            if outer.bandwidth > _MUCH * inner.bandwidth
        ]

    @cached_property
    def node_of_rank(self) -> np.ndarray:
        """``[R]``: the node of each rank."""
        return np.repeat(np.arange(len(self.nodes)), [node.ranks for node in self.nodes])

    @cached_property
    def _units(self) -> np.ndarray:
        """``[levels - 1, R]``: the unit that each rank is in, narrower units first; the last level is everything."""
        rows = [self.node_of_rank]
        for level in self.levels[1:-1]:
            found: dict[tuple[str, ...], int] = {}
            enclosing = [name.name for name in self.levels[self.levels.index(level) : -1]]
            keys = [tuple(node.units[name] for name in enclosing) for node in self.nodes]
            rows.append(np.array([found.setdefault(key, len(found)) for key in keys])[self.node_of_rank])
        return np.stack(rows)

    def units_of(self, level: int, ranks: Sequence[int]) -> np.ndarray:
        """The unit of each of ``ranks`` at a level: ranks with the same number are joined by links up to that level."""
        if level == len(self.levels) - 1:
            return np.zeros(len(ranks), dtype=np.int64)
        return self._units[level][np.asarray(ranks, dtype=np.int64)]

    def level_PP(self, ranks: Sequence[int] | None = None) -> np.ndarray:
        """``[P, P]``: the level whose links join two ranks; -1 on the diagonal."""
        chosen = np.arange(self.num_ranks) if ranks is None else np.asarray(ranks, dtype=np.int64)
        result = np.full((len(chosen), len(chosen)), len(self.levels) - 1, dtype=np.int64)
        for level in reversed(range(len(self.levels) - 1)):
            units = self._units[level][chosen]
            result[units[:, None] == units[None, :]] = level
        result[chosen[:, None] == chosen[None, :]] = -1
        return result

    def link_costs(self, ranks: Sequence[int] | None = None) -> LinkCosts:
        """Seconds a byte and latencies between ranks. Raises ValueError for a rank that is not there."""
        if ranks is not None and max(ranks) >= self.num_ranks:
            raise ValueError(f"topology has {self.num_ranks} ranks, and rank {max(ranks)} was asked for; add its node")
        level_PP = self.level_PP(ranks)
        per_byte = np.array([1 / level.bandwidth for level in self.levels] + [0.0])
        latency = np.array([level.latency_seconds for level in self.levels] + [0.0])
        return LinkCosts(per_byte[level_PP], latency[level_PP])

    def with_nodes(self, nodes: Iterable[Node]) -> Topology:
        """With more nodes at the end, so that ranks that were there keep their numbers."""
        return Topology(self.levels, (*self.nodes, *nodes))

    # -- files ---------------------------------------------------------------------------------------------------------

    @classmethod
    def from_mapping(cls, values: object) -> Topology:
        """From what a file holds. Raises ValueError with what is wrong."""
        if not isinstance(values, Mapping) or set(values) != {"levels", "nodes"}:
            found = sorted(map(str, values)) if isinstance(values, Mapping) else type(values).__name__
            raise ValueError(f"a topology has the keys levels and nodes, not {found}")
        levels, nodes = [], []
        for item in _items(values["levels"], "levels", required={"name", "bandwidth"}, optional={"latency"}):
            latency = quantity(item.get("latency", 0), _TIMES, "a time, e.g. 5us")
            levels.append(Level(str(item["name"]), quantity(item["bandwidth"], _BANDWIDTHS, "e.g. 50 GB/s"), latency))
        for item in _items(values["nodes"], "nodes", required={"host", "ranks"}, optional={"in"}):
            units = item.get("in", {})
            if not isinstance(units, Mapping) or type(item["ranks"]) is not int:
                raise ValueError(f"topology node {item}: ranks must be a whole number, in: a mapping")
            nodes.append(Node(str(item["host"]), item["ranks"], {str(k): str(v) for k, v in units.items()}))
        return cls(tuple(levels), tuple(nodes))

    def as_mapping(self) -> dict[str, object]:
        """As :meth:`from_mapping` reads it."""
        levels = [{"name": v.name, "bandwidth": v.bandwidth, "latency": v.latency_seconds} for v in self.levels]
        nodes = [{"host": n.host, "ranks": n.ranks, **({"in": dict(n.units)} if n.units else {})} for n in self.nodes]
        return {"levels": levels, "nodes": nodes}

    @classmethod
    def from_file(cls, path: str | Path) -> Topology:
        """From YAML or JSON. Raises ValueError naming the file."""
        return cls.from_mapping(read_mapping(path, "topology"))

    def write(self, path: str | Path) -> None:
        """As JSON where the name ends so, else as YAML."""
        write_mapping(path, self.as_mapping())

    @classmethod
    def uniform(
        cls, ranks: int, *, per_node: int = 8, per_rack: int = 8, levels: Sequence[Level] | None = None
    ) -> Topology:
        """``ranks`` ranks in nodes of ``per_node``, ``per_rack`` nodes a rack (the last of each may be short)."""
        if not 1 <= ranks <= MAX_RANKS:
            raise ValueError(f"topology of {ranks} ranks: choose 1 to {MAX_RANKS}")
        sizes = [per_node] * (ranks // per_node) + ([ranks % per_node] if ranks % per_node else [])
        nodes = [Node(f"node{i}", size, {"rack": f"rack{i // per_rack}"}) for i, size in enumerate(sizes)]
        return cls(tuple(levels or DEFAULT_LEVELS), tuple(nodes))


DEFAULT_LEVELS = (
    Level("device", 200e9, 2e-6),
    Level("rack", 50e9, 5e-6),
    Level("cluster", 50e9 / 3, 10e-6),
)
"""Eight accelerators on one switch, a 400 Gb/s adapter each, and a network that is three times narrower above racks."""


def quantity(value: object, units: Mapping[str, float], example: str) -> float:
    """A number, or a number with a unit (``/s`` may follow), in base units. Raises ValueError."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = re.fullmatch(_NUMBER + r"([a-zA-Z]*)(?:/s)?\s*", value) if isinstance(value, str) else None
    if match is None or (match[2] and match[2].lower() not in units):
        raise ValueError(f"topology: {value!r} is not a quantity; write {example}")
    return float(match[1]) * (units[match[2].lower()] if match[2] else 1.0)


def _items(value: object, where: str, *, required: set[str], optional: set[str]) -> list[Mapping[str, object]]:
    items = value if isinstance(value, list) else []
    for item in items:
        keys = set(item) if isinstance(item, Mapping) else set()
        if not required <= keys or keys - required - optional:
            raise ValueError(f"topology {where}: {item!r} must have {sorted(required)} and may have {sorted(optional)}")
    if not items:
        raise ValueError(f"topology {where}={value!r} must be a list of one or more")
    return items


def read_mapping(path: str | Path, what: str) -> object:
    """What a JSON or YAML file holds. Raises ValueError naming it."""
    path = Path(path)
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(f"{what} file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} file {path} cannot be read: {error}") from error
    try:
        if path.suffix == ".json":
            return json.loads(text)
        import yaml

        return yaml.safe_load(text)
    except ImportError as error:
        raise ImportError("YAML needs PyYAML: pip install 'megascale[megatron]', or use JSON") from error
    except Exception as error:
        raise ValueError(f"{what} file {path} is not valid: {error}") from error


def write_mapping(path: str | Path, content: Mapping[str, object]) -> None:
    """JSON where the name ends so, else YAML; the file is whole or not there."""
    path = Path(path)
    if path.suffix == ".json":
        text = json.dumps(content, indent=1)
    else:
        try:
            import yaml
        except ImportError as error:
            raise ImportError("YAML needs PyYAML: pip install 'megascale[megatron]', or use JSON") from error
        text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None)
    beside = path.with_name(path.name + ".part")
    beside.write_text(text + "\n")
    beside.replace(path)

"""Which rank keeps which expert: experts that tokens choose together on one rank, and what is left close by.

Pure functions. Shapes: E experts, P ranks of an expert-parallel group, L = E / P experts a rank; ``pairs_EE[a, b]``
tokens that chose both ``a`` and ``b``, ``counts_PE[p, e]`` tokens of rank ``p`` that chose ``e``.

[Note: placement by level]
A token travels once to each rank that it needs, so that every pair of its experts on one rank saves a trip. Experts are
divided among the units of the widest level first, then among the units inside each, down to ranks: what one rank cannot
hold together stays in one node, what no node can, in one rack. Each division is grown greedily and then improved by
swapping pairs of experts while that gains (Kernighan and Lin, An efficient heuristic procedure for partitioning graphs,
1970).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megascale_omni.topology.levels import Topology, read_mapping, write_mapping

DEFAULT = "default"
"""The key of modules that have no placement of their own."""

Slots = tuple[tuple[int, ...], ...]
"""The global ids of each rank's experts, ascending."""


@dataclass(frozen=True)
class Placement:
    """Experts of each rank, by layer number (from 1, over the whole model) or ``default``.

    Raises:
        ValueError: not every expert once, or ranks with unequal numbers of experts.
    """

    modules: Mapping[str, Slots]

    def __post_init__(self) -> None:
        if not self.modules:
            raise ValueError("a placement needs at least one module, or default")
        for name, slots in self.modules.items():
            if name != DEFAULT and not (name.isdecimal() and int(name) >= 1):
                raise ValueError(f"placement of {name!r}: give the number of a layer, from 1, or {DEFAULT}")
            check_slots(slots, f"placement of {name}")

    def of_layer(self, number: int | None) -> Slots | None:
        """The slots of a layer; None where the file says nothing of it."""
        return self.modules.get(str(number), self.modules.get(DEFAULT))

    def check_layers(self, layers: int) -> None:
        """Raises ValueError where there is something of a layer that a model of ``layers`` layers does not have."""
        beyond = sorted(int(name) for name in self.modules if name != DEFAULT and int(name) > layers)
        if beyond:
            raise ValueError(
                f"the placement has layers {beyond}, the model has {layers}: it was planned for another model; "
                "plan one for this with `megascale topology plan`"
            )

    @property
    def digest(self) -> int:
        """Equal where placements are."""
        return zlib.crc32(repr(sorted((k, v) for k, v in self.modules.items())).encode())

    @classmethod
    def from_file(cls, path: str | Path) -> Placement:
        """From YAML or JSON ``{experts_of_ranks: {LAYER: [[ids of rank 0], ...]}}``. ValueError names the file."""
        values = read_mapping(path, "placement")
        modules = values.get("experts_of_ranks") if isinstance(values, Mapping) else None
        if not isinstance(modules, Mapping):
            raise ValueError(f"placement file {path} has no mapping experts_of_ranks; see `megascale topology plan`")
        try:
            return cls({str(name): _slots_of(ranks, f"placement of {name}") for name, ranks in modules.items()})
        except ValueError as error:
            raise ValueError(f"placement file {path}: {error}") from error

    def write(self, path: str | Path, **more: object) -> None:
        """The file that a run reads; ``more``: what else is to be known of it."""
        modules = {name: [list(rank) for rank in slots] for name, slots in self.modules.items()}
        write_mapping(path, {"experts_of_ranks": modules, **more})


def _slots_of(ranks: object, what: str) -> Slots:
    """From what a file holds. Raises ValueError unless it is a list of lists of whole numbers."""
    rows = [row if isinstance(row, list) else [None] for row in ranks] if isinstance(ranks, list) else [[None]]
    if not all(type(expert) is int for row in rows for expert in row):
        raise ValueError(f"{what}: {ranks!r} must be a list of experts' numbers for each rank, e.g. [[0, 2], [1, 3]]")
    return tuple(tuple(row) for row in rows)


def check_slots(slots: Slots, what: str) -> None:
    """Raises ValueError unless every expert is there once and all ranks have as many."""
    sizes, flat = {len(rank) for rank in slots}, sorted(e for rank in slots for e in rank)
    if len(sizes) != 1 or flat != list(range(len(flat))) or not flat:
        raise ValueError(f"{what}: {[list(r) for r in slots]} must have each expert once and as many on every rank")


def in_order(experts: int, ranks: int) -> Slots:
    """Stock's placement: experts by number."""
    local = experts // ranks
    return tuple(tuple(range(p * local, (p + 1) * local)) for p in range(ranks))


def pairs_of(map_TE: np.ndarray) -> np.ndarray:
    """``[E, E]``: how many tokens chose both; zeros on the diagonal."""
    chosen = map_TE.astype(np.float32)
    pairs = (chosen.T @ chosen).astype(np.int64)
    np.fill_diagonal(pairs, 0)
    return pairs


def place(
    pairs_EE: np.ndarray,
    *,
    ranks: int,
    topology: Topology | None = None,
    members: Sequence[int] | None = None,
    counts_PE: np.ndarray | None = None,
    before: Slots | None = None,
) -> Slots:
    """Experts that are chosen together on one rank, and the rest by level (see [Note: placement by level]).

    ``ranks`` of the group are where ``topology`` says (``members``: the group's ranks in it); without one all links are
    alike. ``counts_PE``: who chooses what; between units of one size each gets what its own tokens choose.
    ``before``: a placement on some of these ranks, by the same number; what is there stays where little is gained.

    Raises:
        ValueError: the number of experts is no multiple of the number of ranks, or not that of ``before``.
    """
    experts = len(pairs_EE)
    if experts % ranks:
        raise ValueError(f"{experts} experts cannot be divided among {ranks} ranks evenly; choose a divisor")
    if before is not None and len(before) * len(before[0]) != experts:
        raise ValueError(
            f"the placement before is of {len(before) * len(before[0])} experts, {experts} are to be placed; "
            "it was planned for another model"
        )
    affinity_EE = pairs_EE.astype(np.float64) + pairs_EE.T
    worth_PE = np.zeros((ranks, experts)) if counts_PE is None else counts_PE.astype(np.float64)
    # Staying is worth half of what a rank's tokens choose of an expert in the mean: noise moves nothing.
    staying = max(worth_PE.mean() / 2, 1 / (1 + experts))
    for rank, old in enumerate((before or ())[:ranks]):
        worth_PE[rank, list(old)] += staying
    tree = 0 if ranks == 1 else _tree(ranks, topology, members)
    found = dict(_divide(np.arange(experts), tree, affinity_EE, worth_PE))
    return tuple(tuple(sorted(found[p].tolist())) for p in range(ranks))


_Tree = int | list["_Tree"]


def _tree(ranks: int, topology: Topology | None, members: Sequence[int] | None) -> _Tree:
    """Ranks (positions in the group) by unit, widest level outside."""
    if topology is None:
        return list(range(ranks))
    of_rank = list(members) if members is not None else list(range(ranks))

    def inside(positions: list[int], level: int) -> _Tree:
        if len(positions) == 1:
            return positions[0]
        if level < 0:
            return list(positions)
        units = topology.units_of(level, [of_rank[p] for p in positions])
        of_units = [[p for p, u in zip(positions, units, strict=True) if u == unit] for unit in dict.fromkeys(units)]
        parts = [inside(of_unit, level - 1) for of_unit in of_units]
        return parts[0] if len(parts) == 1 else parts

    return inside(list(range(ranks)), len(topology.levels) - 2)


def _leaves(tree: _Tree) -> list[int]:
    return [tree] if isinstance(tree, int) else [leaf for part in tree for leaf in _leaves(part)]


def _divide(
    ids: np.ndarray, tree: _Tree, affinity_EE: np.ndarray, worth_PE: np.ndarray
) -> list[tuple[int, np.ndarray]]:
    """The experts ``ids`` of each leaf; ``worth_PE[p, e]`` of keeping ``e`` at ``p``, between units of one size."""
    if isinstance(tree, int):
        return [(tree, ids)]
    leaves = [_leaves(unit) for unit in tree]
    total = sum(map(len, leaves))
    part_E = partition(affinity_EE[np.ix_(ids, ids)], [len(ids) * len(own) // total for own in leaves])
    parts = [ids[part_E == number] for number in range(len(tree))]
    worth = np.array([[worth_PE[own][:, part].sum() for part in parts] for own in leaves])
    fits = np.array([[len(part) * total == len(ids) * len(own) for part in parts] for own in leaves])
    worth = np.where(fits, worth, -np.inf)
    result: list[tuple[int, np.ndarray]] = []
    for _ in tree:
        unit, part = divmod(int(worth.argmax()), len(tree))
        worth[unit, :] = worth[:, part] = -np.inf
        result += _divide(parts[part], tree[unit], affinity_EE, worth_PE)
    return result


def partition(affinity_EE: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """``[E]``: the part of each expert, parts of ``sizes`` members, with much affinity inside parts.

    Ties are broken by the lowest number, so that every rank finds the same.
    """
    experts, parts = len(affinity_EE), len(sizes)
    part_E = np.full(experts, -1)
    for part in np.argsort([-size for size in sizes], kind="stable").tolist():
        free_E = part_E < 0
        chosen = int(np.where(free_E, affinity_EE[:, free_E].sum(1), -np.inf).argmax())  # who has most company left
        towards_E = np.where(free_E, 0.0, -np.inf)
        for _ in range(sizes[part]):
            part_E[chosen] = part
            towards_E = towards_E + affinity_EE[:, chosen]
            towards_E[chosen] = -np.inf
            chosen = int(towards_E.argmax())
    inside_EP = np.stack([affinity_EE[:, part_E == p].sum(1) for p in range(parts)], axis=1)
    for _ in range(4 * experts):
        own_E = inside_EP[np.arange(experts), part_E]
        leave_EE = inside_EP[:, part_E] - own_E[:, None]  # [a, b]: what a gains by going to b's part
        gain_EE = np.where(part_E[:, None] == part_E[None, :], 0.0, leave_EE + leave_EE.T - 2 * affinity_EE)
        a, b = divmod(int(gain_EE.argmax()), experts)
        if gain_EE[a, b] <= 1e-9:
            break
        for expert, source, target in ((a, part_E[a], part_E[b]), (b, part_E[b], part_E[a])):
            inside_EP[:, source] -= affinity_EE[:, expert]
            inside_EP[:, target] += affinity_EE[:, expert]
        part_E[a], part_E[b] = part_E[b], part_E[a]
    return part_E


@dataclass(frozen=True)
class ExpertMove:
    """An expert whose pages another rank keeps from now on."""

    expert: int
    source: int
    target: int


def moves_between(before: Slots, after: Slots) -> list[ExpertMove]:
    """What a new placement moves, ascending by expert."""
    was = {e: p for p, rank in enumerate(before) for e in rank}
    now = {e: p for p, rank in enumerate(after) for e in rank}
    return [ExpertMove(e, was[e], now[e]) for e in sorted(was) if was[e] != now[e]]


def groups_by_level(topology: Topology, size: int) -> list[tuple[tuple[int, ...], str]]:
    """Ranks in groups of ``size``, each inside the lowest level that holds it, with the name of that level.

    Whole groups are taken from the narrowest units first; what is left over in them joins inside the next wider one.

    Raises:
        ValueError: the ranks are no multiple of the size.
    """
    if size < 1 or topology.num_ranks % size:
        raise ValueError(f"{topology.num_ranks} ranks cannot form groups of {size}; choose a divisor")
    left = list(range(topology.num_ranks))
    groups: list[tuple[tuple[int, ...], str]] = []
    for number, level in enumerate(topology.levels):
        units = topology.units_of(number, left)
        rest: list[int] = []
        for unit in dict.fromkeys(units.tolist()):
            inside = [rank for rank, u in zip(left, units, strict=True) if u == unit]
            whole = len(inside) - len(inside) % size
            groups += [(tuple(inside[i : i + size]), level.name) for i in range(0, whole, size)]
            rest += inside[whole:]
        left = rest
    return sorted(groups)

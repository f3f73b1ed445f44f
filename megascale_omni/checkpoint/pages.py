"""Pages of experts in a checkpoint: under module path, global expert and neurons, with the step that each has seen.

[Note: global experts]
A rank's experts are numbered from 0 on every rank; a checkpoint numbers them over all ranks. A page is found again by
(path of its module in the whole model, global expert, first neuron), whatever rank or page size it has in a new layout.

[Note: what is not stored]
Moments that were never made are zeros. A master that equals its weights, which a page without a gradient has, is
made from them. In an increment, what has not changed since the last checkpoint is a reference to where it is; the
last checkpoint may be the one that the run began with, so that what equals the state it was initialised from is not
stored again. What no checkpoint of the folder has is always stored, initial weights too: nothing that a model was made
by makes the same bits again everywhere (see ARCHITECTURE.md).
Steps that a page has missed are not applied: it is stored as it is, with the number of the last step it has seen, and
the history of what the steps were.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from megascale_omni.checkpoint.datafile import Entry, Place, header_of, places, read_tensor
from megascale_omni.checkpoint.digests import Data
from megascale_omni.checkpoint.snapshot import Register
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.shards import PageName, PageShards
from megascale_omni.optimizer.paged_adam import PagedAdam
from megascale_omni.paging.layout import ExpertShape
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.planes import Plane
from megascale_omni.paging.tiers import ABSENT

STATE_PLANES = (Plane.WEIGHT, Plane.MASTER, Plane.MOMENT1, Plane.MOMENT2)
"""What a checkpoint has of a page, in the order in which it lies in the file; the optimizer walks pages alike."""

PageAt = tuple[str, int, int]
"""(module path, global expert, first neuron)."""


@dataclass(frozen=True)
class ExpertsPiece:
    """The experts of one module on this rank.

    Attributes:
        path: of the module in the whole model, the same in every layout. experts: the module.
        first_expert: global number of local expert 0. num_experts: of the whole model. share: which of the pages this
            rank saves; the optimizer's own shards where state is sharded, else any division among the replicas.
        numbers: global numbers of the local experts, where they do not follow the first.
        first_neuron, num_neurons: of an expert, the first neuron on this rank, and how many there are on all ranks;
        None: all are here.
    """

    path: str
    experts: PagedExperts
    first_expert: int
    num_experts: int
    share: PageShards
    numbers: tuple[int, ...] | None = None
    first_neuron: int = 0
    num_neurons: int | None = None

    @property
    def shape(self) -> ExpertShape:
        """Sizes of a whole expert."""
        here = self.experts.shape
        return here if self.num_neurons is None else replace(here, ffn=self.num_neurons)

    def neurons(self, slice_: int) -> slice:
        """The neurons of a slice, as the whole expert counts them."""
        here = self.experts.layout.neurons(slice_)
        return slice(here.start + self.first_neuron, here.stop + self.first_neuron)

    @property
    def numbers_here(self) -> list[int] | dict[str, list[int]]:
        """``[first, end]`` of the global numbers here; ``{"numbers": [...]}`` where they have gaps."""
        first, count = self.first_expert, self.experts.num_experts
        if self.numbers is None or self.numbers == tuple(range(first, first + count)):
            return [first, first + count]
        return {"numbers": list(self.numbers)}

    @property
    def all_numbers(self) -> tuple[int, ...]:
        """Global number of each local expert."""
        return self.numbers or tuple(range(self.first_expert, self.first_expert + self.experts.num_experts))

    def at(self, name: PageName) -> PageAt:
        """A local page's global name."""
        number = self.first_expert + name[0] if self.numbers is None else self.numbers[name[0]]
        return self.path, number, self.neurons(name[1]).start


@dataclass(frozen=True)
class StoredPage:
    """A page as an index has it: neurons ``start .. stop``, last applied step, where each plane is."""

    at: PageAt
    stop: int
    last_step: int
    planes: Mapping[str, Place]


@dataclass(frozen=True)
class PagesPlan:
    """What a rank writes to its data file ``path``, as the state is now. What it makes of that, on any thread, later.

    Attributes:
        pages: piece, page, last step, and for each plane what gives its bytes, or its place in an earlier checkpoint.
        modules, optimizer: of the index.
    """

    path: str
    pages: list[tuple[ExpertsPiece, PageName, int, dict[Plane, Place | Callable[[], Data]]]]
    modules: dict[str, Any]
    optimizer: dict[str, Any] | None

    @cached_property
    def entries(self) -> list[Entry]:
        """The entries of the file."""
        return [
            _entry(piece, name, plane, source)
            for piece, name, _, planes in self.pages
            for plane, source in planes.items()
            if not isinstance(source, Place)
        ]

    @cached_property
    def header(self) -> bytes:
        """The file's header."""
        return header_of(self.entries)

    def stored(self) -> dict[PageAt, StoredPage]:
        """The pages as the index has them, and as the next increment sees them."""
        written = iter(places(self.path, self.entries, header_bytes=len(self.header)))
        result = {}
        for piece, name, last, planes in self.pages:
            at, stop = piece.at(name), piece.neurons(name[1]).stop
            where = {p.name.lower(): s if isinstance(s, Place) else next(written) for p, s in planes.items()}
            result[at] = StoredPage(at, stop, last, where)
        return result

    def index(self, stored: Mapping[PageAt, StoredPage]) -> bytes:
        """The index."""
        pages = [
            [*page.at, page.stop, page.last_step, {label: place.as_list() for label, place in page.planes.items()}]
            for page in stored.values()
        ]
        return json.dumps({"modules": self.modules, "pages": pages, "optimizer": self.optimizer}).encode()


def plan(
    pieces: Sequence[ExpertsPiece],
    adam: PagedAdam | None,
    *,
    path: str,
    register: Register,
    base: Mapping[PageAt, StoredPage] | None,
) -> PagesPlan:
    """What this rank writes to its page file ``path``.

    ``base``: pages as the last checkpoint has them; those that have not changed since are referred to. Without an
    optimizer weights are caught up and stored alone.
    """
    pages: list[tuple[ExpertsPiece, PageName, int, dict[Plane, Place | Callable[[], Data]]]] = []
    for piece in pieces:
        owned = piece.share.owned(piece.experts)
        if adam is None:
            piece.experts.manager.catch_up(piece.experts.pages, piece.experts.page_ids(Plane.WEIGHT, owned))
        frozen = adam is not None and piece.experts not in adam.bindings
        columns = _Columns.of(piece.experts, owned, with_state=adam is not None)
        for row, name in enumerate(owned):
            known = base.get(piece.at(name)) if base is not None else None
            planes: dict[Plane, Place | Callable[[], Data]] = {}
            for plane in columns.planes(piece.experts, row, name):
                label = plane.name.lower()
                if known is not None and label in known.planes and not columns.changed[plane][row]:
                    planes[plane] = known.planes[label]
                else:
                    planes[plane] = _chunk(piece.experts, name, plane, int(columns.ids[plane][row]), register)
            # Frozen experts miss no step: nothing is applied to them.
            last = adam.num_steps if frozen and adam is not None else int(columns.last_step[row])
            pages.append((piece, name, last, planes))
    optimizer = None if adam is None else _optimizer_index(adam)
    return PagesPlan(path, pages, _modules_index(pieces, adam), optimizer)


def mark_saved(pieces: Iterable[ExpertsPiece], changed: bool = False) -> None:
    """Says that this rank's pages are as the last checkpoint has them (or that some are not)."""
    for piece in pieces:
        for plane in STATE_PLANES:
            ids = piece.experts.page_ids(plane, piece.share.owned(piece.experts))
            piece.experts.manager.table.changed[ids] = changed


@dataclass(frozen=True)
class _Columns:
    """What the page table says of a module's pages, in the order of their names, plane by plane."""

    ids: Mapping[Plane, np.ndarray]
    present: Mapping[Plane, np.ndarray]
    changed: Mapping[Plane, np.ndarray]
    last_step: np.ndarray

    @classmethod
    def of(cls, experts: PagedExperts, names: Sequence[PageName], *, with_state: bool) -> _Columns:
        table = experts.manager.table
        if experts.manager.whole.unsettled:
            experts.manager.whole.settle()
        wanted = [p for p in STATE_PLANES if p in experts.pages.dtypes] if with_state else [Plane.WEIGHT]
        ids = {plane: experts.page_ids(plane, names) for plane in wanted}
        present = {plane: table.tier[of_plane] != ABSENT for plane, of_plane in ids.items()}
        changed = {plane: table.changed[of_plane] for plane, of_plane in ids.items()}
        return cls(ids, present, changed, table.last_step[ids[Plane.WEIGHT]])

    def planes(self, experts: PagedExperts, row: int, name: PageName) -> list[Plane]:
        """The planes of a page that are stored; see [Note: what is not stored]."""
        here = [plane for plane, present in self.present.items() if present[row]]
        if Plane.MASTER in here and Plane.MOMENT1 not in here and _master_is_weights(experts, name):
            here.remove(Plane.MASTER)
        return here


def _master_is_weights(experts: PagedExperts, name: PageName) -> bool:
    with experts.lease(Plane.WEIGHT, [name]) as weights, experts.lease(Plane.MASTER, [name]) as masters:
        return torch.equal(weights.page(*name).float(), masters.page(*name))


def _entry(piece: ExpertsPiece, name: PageName, plane: Plane, chunk: Callable[[], Data]) -> Entry:
    experts = piece.experts
    path, expert, start = piece.at(name)
    numel, dtype = experts.layout.page_numel(name[1]), experts.pages.dtypes[plane]
    return Entry(f"{path}|{expert}|{start}|{plane.name.lower()}", dtype, (numel,), [chunk])


def _chunk(experts: PagedExperts, name: PageName, plane: Plane, page_id: int, register: Register) -> Callable[[], Data]:
    manager = experts.manager
    numel = experts.layout.page_numel(name[1])
    moves = manager.pager.can_evict or manager.arena.device.type != "cpu"  # a device's bytes have to be copied, too
    read = _copying(manager, page_id) if moves else _reading(manager, page_id, numel)
    return register(page_id, read, numel * experts.pages.dtypes[plane].itemsize, copies=moves)


def _reading(manager: ExpertManager, page_id: int, numel: int) -> Callable[[], Data]:
    return lambda: read_tensor(manager.pager.tensor(page_id)[:numel])  # it stays where it is: any thread may look


def _copying(manager: ExpertManager, page_id: int) -> Callable[[], Data]:
    return lambda: read_tensor(manager.page_copy(page_id))


def _modules_index(pieces: Sequence[ExpertsPiece], adam: PagedAdam | None) -> dict[str, Any]:
    modules: dict[str, dict[str, Any]] = {}
    for piece in pieces:
        binding = None if adam is None else adam.bindings.get(piece.experts)
        shape = piece.shape
        modules[piece.path] = {
            "hidden": shape.hidden,
            "ffn": shape.ffn,
            "gated": shape.gated,
            "bias": shape.bias,
            "num_experts": piece.num_experts,
            "style": piece.experts.names.style,
            "groups": None if binding is None else [binding.weights, binding.biases],
        }
        if piece.experts.manager.heat is not None:
            heat = piece.experts.manager.heat.stored(piece.experts.pages.entry.module, piece.all_numbers)
            modules[piece.path]["heat"] = heat
    return modules


def _optimizer_index(adam: PagedAdam) -> dict[str, Any]:
    if adam.is_open:
        raise RuntimeError(
            "a checkpoint between backward and optimizer step: some experts are stepped already; save after"
        )
    groups = []
    for number, group in enumerate(adam.param_groups):
        base, records = adam.history.kept(number)
        plain = {key: value for key, value in group.items() if key != "params" and _is_plain(value)}
        rows = [[r.lr, r.weight_decay, r.beta1, r.beta2, r.eps] for r in records]
        groups.append({"settings": plain, "base": base, "records": rows})
    return {"num_steps": adam.num_steps, "arithmetic": adam.arithmetic.name, "groups": groups}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)

"""Pages of experts in a checkpoint: under module path, global expert and neurons, with the step that each has seen.

[Note: global experts]
A rank's experts are numbered from 0 on every rank; a checkpoint numbers them over all ranks. A page is found again by
(path of its module in the whole model, global expert, first neuron), whatever rank or page size it has in a new layout.

[Note: what is not stored]
Moments that were never made are zeros. A master that equals its weights, which a page without a gradient has, is
made from them. In an increment, what has not changed since the last checkpoint is a reference to where it is.
Steps that a page has missed are not applied: it is stored as it is, with the number of the last step it has seen, and
the history of what the steps were.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megascale_omni.checkpoint.datafile import Entry, Place, places, read_tensor
from megascale_omni.checkpoint.dense import Register
from megascale_omni.checkpoint.digests import Data
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.shards import PageName, PageShards
from megascale_omni.optimizer.paged_adam import PagedAdam
from megascale_omni.paging.planes import Plane

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
    """

    path: str
    experts: PagedExperts
    first_expert: int
    num_experts: int
    share: PageShards
    numbers: tuple[int, ...] | None = None

    @property
    def numbers_here(self) -> list[int] | dict[str, list[int]]:
        """``[first, end]`` of the global numbers here; ``{"numbers": [...]}`` where they have gaps."""
        first, count = self.first_expert, self.experts.num_experts
        if self.numbers is None or self.numbers == tuple(range(first, first + count)):
            return [first, first + count]
        return {"numbers": list(self.numbers)}

    def at(self, name: PageName) -> PageAt:
        """A local page's global name."""
        number = self.first_expert + name[0] if self.numbers is None else self.numbers[name[0]]
        return self.path, number, self.experts.layout.neurons(name[1]).start


@dataclass(frozen=True)
class StoredPage:
    """A page as an index has it: neurons ``start .. stop``, last applied step, where each plane is."""

    at: PageAt
    stop: int
    last_step: int
    planes: Mapping[str, Place]


@dataclass(frozen=True)
class PagesPlan:
    """What a rank writes: entries of its data file, its index, and the stored pages as the next increment sees them."""

    entries: list[Entry]
    index: bytes
    pages: dict[PageAt, StoredPage]


def plan(
    pieces: Sequence[ExpertsPiece],
    adam: PagedAdam | None,
    *,
    path: str,
    register: Register,
    base: Mapping[PageAt, StoredPage] | None,
) -> PagesPlan:
    """The entries of this rank's page file ``path``.

    ``base``: pages as the last checkpoint has them; those that have not changed since are referred to. Without an
    optimizer weights are caught up and stored alone.
    """
    entries: list[Entry] = []
    pages: list[tuple[PageAt, int, int, dict[str, Place | int]]] = []
    for piece in pieces:
        for name in piece.share.owned(piece.experts):
            at, neurons = piece.at(name), piece.experts.layout.neurons(name[1])
            known = base.get(at) if base is not None else None
            planes: dict[str, Place | int] = {}
            for plane in _planes(piece.experts, name, with_state=adam is not None):
                label = plane.name.lower()
                if known is not None and label in known.planes and not _changed(piece.experts, plane, name):
                    planes[label] = known.planes[label]
                else:
                    planes[label] = len(entries)
                    entries.append(_entry(piece, name, plane, register))
            pages.append((at, neurons.stop, _last_step(piece.experts, name), planes))
    written = places(path, entries)
    stored = {
        at: StoredPage(at, stop, last, {k: written[p] if isinstance(p, int) else p for k, p in planes.items()})
        for at, stop, last, planes in pages
    }
    return PagesPlan(entries, _index(pieces, adam, stored), stored)


def mark_saved(pieces: Iterable[ExpertsPiece], changed: bool = False) -> None:
    """Says that this rank's pages are as the last checkpoint has them (or that some are not)."""
    for piece in pieces:
        for plane in STATE_PLANES:
            ids = piece.experts.page_ids(plane, piece.share.owned(piece.experts))
            piece.experts.manager.table.changed[ids] = changed


def _changed(experts: PagedExperts, plane: Plane, name: PageName) -> bool:
    return bool(experts.manager.table.changed[experts.page_ids(plane, [name])[0]])


def _last_step(experts: PagedExperts, name: PageName) -> int:
    return int(experts.manager.table.last_step[experts.page_ids(Plane.WEIGHT, [name])[0]])


def _planes(experts: PagedExperts, name: PageName, *, with_state: bool) -> list[Plane]:
    if not with_state:
        experts.manager.catch_up(experts.pages, experts.page_ids(Plane.WEIGHT, [name]))
        return [Plane.WEIGHT]
    dtypes = experts.pages.dtypes
    here = [p for p in STATE_PLANES if p in dtypes and experts.manager.present(experts.pages, p)[name]]
    if Plane.MASTER in here and Plane.MOMENT1 not in here and _master_is_weights(experts, name):
        here.remove(Plane.MASTER)
    return here


def _master_is_weights(experts: PagedExperts, name: PageName) -> bool:
    with experts.lease(Plane.WEIGHT, [name]) as weights, experts.lease(Plane.MASTER, [name]) as masters:
        return torch.equal(weights.page(*name).float(), masters.page(*name))


def _entry(piece: ExpertsPiece, name: PageName, plane: Plane, register: Register) -> Entry:
    experts = piece.experts
    numel, dtype = experts.layout.page_numel(name[1]), experts.pages.dtypes[plane]
    page_id = int(experts.page_ids(plane, [name])[0])
    path, expert, start = piece.at(name)
    chunk = register(page_id, _reader(experts, plane, name, page_id), numel * dtype.itemsize)
    return Entry(f"{path}|{expert}|{start}|{plane.name.lower()}", dtype, (numel,), [chunk])


def _reader(experts: PagedExperts, plane: Plane, name: PageName, page_id: int) -> Callable[[], Data]:
    def read() -> Data:
        if not experts.manager.pager.can_evict:  # it stays where it is: any thread may look
            return read_tensor(experts.manager.page_tensor(page_id))
        with experts.lease(plane, [name]) as lease:
            return read_tensor(lease.page(*name).clone())

    return read


def _index(pieces: Sequence[ExpertsPiece], adam: PagedAdam | None, stored: Mapping[PageAt, StoredPage]) -> bytes:
    modules = {}
    for piece in pieces:
        binding = None if adam is None else adam.bindings.get(piece.experts)
        shape = piece.experts.shape
        modules[piece.path] = {
            "hidden": shape.hidden,
            "ffn": shape.ffn,
            "gated": shape.gated,
            "bias": shape.bias,
            "num_experts": piece.num_experts,
            "groups": None if binding is None else [binding.weights, binding.biases],
        }
    pages = [
        [*page.at, page.stop, page.last_step, {label: place.as_list() for label, place in page.planes.items()}]
        for page in stored.values()
    ]
    optimizer = None if adam is None else _optimizer_index(adam)
    return json.dumps({"modules": modules, "pages": pages, "optimizer": optimizer}).encode()


def _optimizer_index(adam: PagedAdam) -> dict[str, Any]:
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

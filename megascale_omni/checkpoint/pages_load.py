"""Loading pages: into another layout, another page size, with or without the optimizer's state."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megascale_omni.checkpoint.datafile import DTYPES, NAMES, Place, read_into
from megascale_omni.checkpoint.pages import STATE_PLANES, ExpertsPiece, PageAt, StoredPage
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.shards import PageName
from megascale_omni.optimizer.arithmetic import arithmetic_for
from megascale_omni.optimizer.history import History, StepRecord
from megascale_omni.optimizer.paged_adam import MOMENTS, PagedAdam
from megascale_omni.paging.layout import ExpertShape, PageLayout
from megascale_omni.paging.observe import StoredHeat
from megascale_omni.paging.planes import Plane


@dataclass(frozen=True)
class StoredModule:
    """A module as it was saved.

    Attributes:
        shape: sizes of an expert. num_experts: of the whole model. histories: of its weights' and biases' groups.
        style: names of its tensors, empty where older builds saved it.
    """

    shape: ExpertShape
    num_experts: int
    histories: tuple[Group | None, Group | None]
    style: str = ""


@dataclass(frozen=True)
class Group:
    """A stored parameter group: its settings, and the steps ``base + 1 ..`` that it applied."""

    settings: Mapping[str, Any]
    base: int
    records: tuple[tuple[float, ...], ...]

    def since(self, step: int) -> list[StepRecord]:
        """Records of the steps after ``step``."""
        if step < self.base:
            raise ValueError(f"a page of step {step} needs steps that are not kept, those up to {self.base}")
        first = step + 1
        return [StepRecord(first + i, *row) for i, row in enumerate(self.records[step - self.base :])]


@dataclass
class PagesIndex:
    """What all ranks stored of pages."""

    folder: Path
    modules: dict[str, StoredModule] = field(default_factory=dict)
    pages: dict[tuple[str, int], list[StoredPage]] = field(default_factory=dict)
    num_steps: int | None = None
    arithmetic: str = ""
    heat: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, indices: Iterable[bytes]) -> PagesIndex:
        """From the ranks' indices.

        Raises:
            ValueError: ranks that say different things about a module, or overlapping pages.
        """
        index = cls(folder)
        for data in indices:
            index._add(json.loads(data))
        for at, pages in index.pages.items():
            pages.sort(key=lambda page: page.at[2])
            for one, other in itertools.pairwise(pages):
                if other.at[2] < one.stop:
                    raise ValueError(f"checkpoint {folder} has neurons {other.at[2]}.. of {at} twice")
        return index

    def _add(self, content: dict[str, Any]) -> None:
        optimizer = content["optimizer"]
        groups: list[Group] = []
        if optimizer is not None:
            if self.num_steps not in (None, optimizer["num_steps"]):
                raise ValueError(f"checkpoint {self.folder}: its ranks have applied different numbers of steps")
            self.num_steps, self.arithmetic = optimizer["num_steps"], optimizer["arithmetic"]
            groups = [
                Group(group["settings"], group["base"], tuple(map(tuple, group["records"])))
                for group in optimizer["groups"]
            ]
        for path, item in content["modules"].items():
            shape = ExpertShape(hidden=item["hidden"], ffn=item["ffn"], gated=item["gated"], bias=item["bias"])
            weights, biases = (None if g is None else groups[g] for g in item["groups"] or (None, None))
            module = StoredModule(shape, item["num_experts"], (weights, biases), item.get("style", ""))
            if "heat" in item:
                heat = item["heat"]  # of this rank, or of all ranks of a run whose checkpoint was converted
                self.heat.setdefault(path, []).extend(heat if isinstance(heat, list) else [heat])
            if self.modules.setdefault(path, module) != module:
                raise ValueError(f"checkpoint {self.folder}: its ranks say different things about {path}")
        for path, expert, start, stop, last_step, planes in content["pages"]:
            places = {label: Place(*place) for label, place in planes.items()}
            page = StoredPage((path, expert, start), stop, last_step, places)
            self.pages.setdefault((path, expert), []).append(page)

    def covering(self, at: PageAt, stop: int) -> list[StoredPage]:
        """The stored pages that hold neurons ``at[2] .. stop`` of an expert, in order."""
        return [p for p in self.pages.get(at[:2], ()) if p.at[2] < stop and p.stop > at[2]]

    def problems(self, pieces: Sequence[ExpertsPiece], *, with_state: bool) -> list[str]:
        """Why the pieces could not be loaded; empty where they can."""
        found = []
        for piece in pieces:
            module = self.modules.get(piece.path)
            if module is None:
                found.append(f"has no experts {piece.path}")
                continue
            if (module.shape, module.num_experts) != (piece.shape, piece.num_experts):
                found.append(
                    f"has {module.num_experts} experts of {module.shape} at {piece.path}, the model needs "
                    f"{piece.num_experts} of {piece.shape}"
                )
                continue
            found += self._page_problems(piece)
            if with_state and self.num_steps is None:
                found.append("has no optimizer state of experts; load the weights alone")
        return found

    def _page_problems(self, piece: ExpertsPiece) -> list[str]:
        wanted = DTYPES[piece.experts.pages.dtypes[Plane.WEIGHT]]
        for name in _names(piece.experts):
            at, neurons = piece.at(name), piece.neurons(name[1])
            pages = self.covering(at, neurons.stop)
            held = sum(min(p.stop, neurons.stop) - max(p.at[2], neurons.start) for p in pages)
            if held != neurons.stop - neurons.start:
                return [f"does not have all of {piece.path}, expert {at[1]}, neurons {neurons.start}..{neurons.stop}"]
            dtype = pages[0].planes["weight"].dtype
            if dtype != wanted:
                return [f"has the weights of {piece.path} as {dtype}, the run needs {wanted}"]
        return []


def _names(experts: PagedExperts) -> list[PageName]:
    return [(e, s) for e in range(experts.num_experts) for s in range(experts.layout.num_slices)]


@torch.no_grad()
def load_pages(index: PagesIndex, pieces: Sequence[ExpertsPiece], adam: PagedAdam | None, *, with_state: bool) -> None:
    """Fills the pieces' pages; with ``with_state`` masters, moments, steps and history too.

    Without it weights are brought up to the checkpoint's last step, and masters are made from them. A collective where
    the optimizer's state is sharded. ``index.problems`` must be empty.
    """
    if adam is not None and with_state:
        _load_history(index, pieces, adam)
    elif adam is not None:
        adam.catch_up_all()  # moments stay, and must not lag behind the weights that come
    for piece in pieces:
        experts = piece.experts
        manager = experts.manager
        manager.drop(_present(experts, Plane.GRADIENT))
        bound = adam is not None and with_state and experts in adam.bindings
        owned = set(adam.shards.owned(experts)) if bound and adam is not None else set()
        if adam is not None and with_state and not bound:
            _make_planes(index, piece)
            owned = set(piece.share.owned(experts))
        for name in _names(experts):
            _load_page(index, piece, name, with_state=name in owned, catch_up=not bound)
            if not bound:
                last = adam.num_steps if adam is not None else 0
                manager.table.last_step[experts.page_ids(Plane.WEIGHT, [name])] = last
    if adam is None:
        return
    if not with_state:
        adam.refresh_masters()
        return
    if adam.max_lag == 0:  # weights are read by ranks, or without asking, that could not catch them up
        adam.catch_up_all()
        for experts in adam.modules:
            adam.tensors.sync_weights(experts)


def load_heat(index: PagesIndex, pieces: Sequence[ExpertsPiece]) -> None:
    """Gives the heat that the checkpoint has of the experts to those who keep it here."""
    for manager in {piece.experts.manager for piece in pieces}:
        here = [piece for piece in pieces if piece.experts.manager is manager and piece.path in index.heat]
        if manager.heat is not None and here:
            stored = {
                piece.experts.pages.entry.module: StoredHeat(
                    index.heat[piece.path], piece.all_numbers, piece.num_experts, piece.share.rank, piece.share.size
                )
                for piece in here
            }
            manager.heat.restore(stored)


def _make_planes(index: PagesIndex, piece: ExpertsPiece) -> None:
    """Gives frozen experts the planes that are stored of them, so that their state is there when they thaw."""
    stored = {
        label for (path, _), pages in index.pages.items() if path == piece.path for p in pages for label in p.planes
    }
    for plane in STATE_PLANES[1:]:
        if plane.name.lower() in stored:
            piece.experts.manager.set_plane_dtype(piece.experts.pages, plane, torch.float32)


def _present(experts: PagedExperts, plane: Plane) -> Any:  # noqa: ANN401 - page ids
    if plane not in experts.pages.dtypes:
        return experts.page_ids(Plane.WEIGHT, [])
    mask = experts.manager.present(experts.pages, plane)
    return experts.page_ids(plane, [name for name in _names(experts) if mask[name]])


def _load_page(index: PagesIndex, piece: ExpertsPiece, name: PageName, *, with_state: bool, catch_up: bool) -> None:
    experts, at = piece.experts, piece.at(name)
    neurons = piece.neurons(name[1])
    pages = index.covering(at, neurons.stop)
    exact = len(pages) == 1 and (pages[0].at[2], pages[0].stop) == (neurons.start, neurons.stop)
    caught_up = catch_up or not exact
    state = planes_of(index, at[:2], neurons, catch_up=caught_up)
    last = (index.num_steps or 0) if caught_up else pages[0].last_step
    for plane in STATE_PLANES:
        tensor = state.get(plane)
        if plane is not Plane.WEIGHT and not with_state:
            continue
        if plane is Plane.MASTER and plane in experts.pages.dtypes and tensor is None:
            tensor = state[Plane.WEIGHT].float()
        _put(experts, plane, name, tensor)
    table = experts.manager.table
    table.last_step[experts.page_ids(Plane.WEIGHT, [name])] = last
    for plane in STATE_PLANES if not caught_up else ():  # it is, to the bit, what the checkpoint has
        if plane is Plane.WEIGHT or with_state:
            table.changed[experts.page_ids(plane, [name])] = False


def _put(experts: PagedExperts, plane: Plane, name: PageName, tensor: torch.Tensor | None) -> None:
    """Gives a page its elements, or makes it absent."""
    manager = experts.manager
    if plane not in experts.pages.dtypes:
        return
    ids = experts.page_ids(plane, [name])
    if tensor is None:
        if manager.present(experts.pages, plane)[name]:
            manager.drop(ids)
        return
    manager.create_ids(experts.pages, plane, ids)
    with experts.lease(plane, [name]) as lease:
        lease.mark_dirty()
        lease.page(*name).copy_(tensor)


def planes_of(
    index: PagesIndex, expert: tuple[str, int], neurons: slice, *, catch_up: bool
) -> dict[Plane, torch.Tensor]:
    """The stored planes of neurons ``neurons`` of an expert (module path, global number), flat, as one page.

    ``catch_up`` applies the steps that the stored pages have missed; needed where they are cut otherwise.
    """
    pages = index.covering((*expert, neurons.start), neurons.stop)
    parts = [(page, _read(index, page)) for page in pages]
    if catch_up and index.num_steps is not None:
        for page, planes in parts:
            _replay(index, expert[0], page, planes)
    if len(parts) == 1 and (pages[0].at[2], pages[0].stop) == (neurons.start, neurons.stop):
        return parts[0][1]
    return _recut(index.modules[expert[0]].shape, parts, neurons)


def _read(index: PagesIndex, page: StoredPage) -> dict[Plane, torch.Tensor]:
    planes = {}
    for label, place in page.planes.items():
        dtype = NAMES[place.dtype]
        tensor = torch.empty((place.end - place.begin) // dtype.itemsize, dtype=dtype)
        read_into(index.folder, place, tensor)
        planes[Plane[label.upper()]] = tensor
    return planes


def _replay(index: PagesIndex, path: str, page: StoredPage, planes: dict[Plane, torch.Tensor]) -> None:
    """Applies the steps that a stored page has missed, as the optimizer would have on the next read."""
    module = index.modules[path]
    weights, biases = module.histories
    if weights is None or index.num_steps is None or page.last_step >= index.num_steps:
        return
    arithmetic = arithmetic_for(
        decoupled=index.arithmetic.endswith("adamw"),
        fused="fused" in index.arithmetic,
        device=torch.device("cuda") if "cuda" in index.arithmetic else None,
    )
    layout = _layout_of(module.shape, page)
    cut = layout.matrix_numel(0)
    low = planes[Plane.WEIGHT]
    p = planes.get(Plane.MASTER)
    if p is None:
        p = low if low.dtype is torch.float32 else low.float()
    m, v = (planes.get(plane, torch.zeros_like(p)) for plane in MOMENTS)
    for region, group in ((slice(0, cut), weights), (slice(cut, p.numel()), biases)):
        if group is not None and region.start < p.numel():
            records = group.since(page.last_step)
            arithmetic.replay(p=p[region], m=m[region], v=v[region], records=records)
    if low.dtype is not torch.float32:
        low.copy_(p)
        planes[Plane.MASTER] = p
    if Plane.MOMENT1 in planes or bool(m.any()) or bool(v.any()):
        planes[Plane.MOMENT1], planes[Plane.MOMENT2] = m, v


def _layout_of(shape: ExpertShape, page: StoredPage) -> PageLayout:
    """A layout in which the stored page's elements are those of slice 0 (or, without its down bias, of slice 1)."""
    rows = page.stop - page.at[2]
    return PageLayout(ExpertShape(hidden=shape.hidden, ffn=rows, gated=shape.gated, bias=shape.bias), rows)


def _recut(
    shape: ExpertShape, parts: Sequence[tuple[StoredPage, dict[Plane, torch.Tensor]]], neurons: slice
) -> dict[Plane, torch.Tensor]:
    """One page of neurons ``neurons`` from stored pages of other neurons, plane by plane."""
    target_page = StoredPage((parts[0][0].at[0], parts[0][0].at[1], neurons.start), neurons.stop, 0, {})
    result: dict[Plane, torch.Tensor] = {}
    for plane in {plane for _, planes in parts for plane in planes}:
        source_dtype = next(planes[plane].dtype for _, planes in parts if plane in planes)
        rows = neurons.stop - neurons.start
        target = torch.zeros(_numel(shape, rows, first=neurons.start == 0), dtype=source_dtype)
        for page, planes in parts:
            source = planes.get(plane)
            if source is None and plane is Plane.MASTER:
                source = planes[Plane.WEIGHT].float()
            if source is not None:
                _copy_rows(shape, page, source, target_page, target)
        result[plane] = target
    return result


def _numel(shape: ExpertShape, rows: int, *, first: bool) -> int:
    numel = shape.num_matrices * rows * shape.hidden
    if shape.bias:
        numel += (shape.num_matrices - 1) * rows + (shape.hidden if first else 0)
    return numel


def _copy_rows(
    shape: ExpertShape, page: StoredPage, source: torch.Tensor, target_page: StoredPage, target: torch.Tensor
) -> None:
    """Copies the neurons that both pages have, and the down bias where both are an expert's first page."""
    first, last = max(page.at[2], target_page.at[2]), min(page.stop, target_page.stop)
    from_layout, to_layout = _layout_of(shape, page), _layout_of(shape, target_page)
    for part in from_layout.parts(0):
        if part.is_bias and part.value == "down_bias":
            if page.at[2] == target_page.at[2] == 0:
                target[-shape.hidden :].copy_(source[-shape.hidden :])
            continue
        rows_from = from_layout.part(source, 0, part)[first - page.at[2] : last - page.at[2]]
        to_layout.part(target, 0, part)[first - target_page.at[2] : last - target_page.at[2]].copy_(rows_from)


def _load_history(index: PagesIndex, pieces: Sequence[ExpertsPiece], adam: PagedAdam) -> None:
    """Gives the optimizer the steps and settings of the groups that its modules had.

    Raises:
        ValueError: modules of one group that had different ones; nothing has been loaded then.
    """
    assert index.num_steps is not None
    groups: dict[int, Group] = {}
    for piece in pieces:
        binding = adam.bindings.get(piece.experts)
        if binding is None:
            continue
        for number, group in zip((binding.weights, binding.biases), index.modules[piece.path].histories, strict=True):
            if number is None:
                continue
            if group is None:  # it was frozen when it was saved, at its last step or before the first one
                continue
            if groups.setdefault(number, group) != group:
                raise ValueError(
                    f"{piece.path} is in a parameter group with modules whose steps had other settings when they were "
                    "saved"
                )
    adam.num_steps = index.num_steps
    adam.history = History()
    for number, own in enumerate(adam.param_groups):
        known = groups.get(number)
        if known is not None:
            adam.history.restore(number, base=known.base, records=known.since(known.base))
            own.update({k: tuple(v) if k == "betas" else v for k, v in known.settings.items() if k in own})
        else:
            adam.history.restore(number, base=index.num_steps, records=[])

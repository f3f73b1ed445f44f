"""Pages of experts in DeepSpeed's checkpoints: saved beside stock's files, loaded on any number of ranks.

Pages are caught up with the optimizer as they are read, so that all of a checkpoint is of the same step. Each page is
written by one of the ranks that have it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_ext.experts import DeepSpeedExperts
from deepspeed_ext.run import Run
from deepspeed_ext.stepping import ExpertsStep, counted_once
from megascale_omni.checkpoint.pages_file import (
    BUILDING,
    FOLDER,
    ModuleRecord,
    PagesReader,
    PagesWriter,
    has_pages,
    page_name,
    recut,
    write_manifest,
)
from megascale_omni.optimizer.state_sweeps import MOMENTS
from megascale_omni.optimizer.state_tensors import master_plane
from megascale_omni.paging.planes import Plane
from megascale_omni.ranks import all_or_none

_PLANE_NAMES = {Plane.WEIGHT: "weight", Plane.MASTER: "master", Plane.MOMENT1: "exp_avg", Plane.MOMENT2: "exp_avg_sq"}


def record_of(experts: DeepSpeedExperts) -> ModuleRecord:
    """What the manifest says of a module."""
    shape = experts.shape
    return ModuleRecord(
        path=experts.path,
        num_experts=experts.all_experts,
        hidden=shape.hidden,
        ffn=shape.ffn,
        gated=shape.gated,
        bias=shape.bias,
        rows=experts.layout.rows,
        style=experts.names.style,
    )


@torch.no_grad()
def save(folder: Path, run: Run, modules: list[DeepSpeedExperts], step: ExpertsStep | None) -> None:
    """Writes all pages below ``folder`` (that of the tag), for :func:`publish` to name. A collective of all ranks.

    From when it returns until then the checkpoint is refused, whatever was there before: see [Note: two saves of one
    tag].

    Raises:
        RuntimeError: on every rank, where one could not write; what was there before is still there.
    """
    building = folder / BUILDING
    first = dist.get_rank() == 0
    together = partial(all_or_none, kind=RuntimeError, doing=f"saving {folder / FOLDER}")
    together(partial(_make_empty, building) if first else _nothing)
    together(partial(_write_pages, building, run, modules, step))
    together(partial(_finish, building, folder / FOLDER, modules, step) if first else _nothing)


def publish(folder: Path) -> None:
    """Names what :func:`save` has written, when every rank's other files are there too. A collective of all ranks."""
    together = partial(all_or_none, kind=RuntimeError, doing=f"saving {folder}")
    together(_nothing)  # a rank that has more to write is not here yet
    together(partial(os.rename, folder / BUILDING, folder / FOLDER) if dist.get_rank() == 0 else _nothing)


def _nothing() -> None:
    """What the other ranks do meanwhile."""


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)  # what an interrupted save has left
    folder.mkdir(parents=True)


def _write_pages(folder: Path, run: Run, modules: list[DeepSpeedExperts], step: ExpertsStep | None) -> None:
    writer, shards = PagesWriter(folder, dist.get_rank()), counted_once(run)
    for experts in modules:
        manager = experts.manager
        stepped = step is not None and experts in step.adam.bindings
        planes = [master_plane(experts), *MOMENTS] if stepped else [Plane.WEIGHT]
        for name in shards.owned(experts):
            manager.catch_up(experts.pages, experts.page_ids(Plane.WEIGHT, [name]))
            with ExitStack() as stack:
                there = [plane for plane in planes if manager.present(experts.pages, plane)[name]]
                leases = {plane: stack.enter_context(experts.lease(plane, [name])) for plane in there}
                pages = {_PLANE_NAMES[plane]: lease.page(*name) for plane, lease in leases.items()}
                writer.add(page_name(experts.path, experts.owned.start + name[0], name[1]), pages)
    writer.close()


def _finish(building: Path, target: Path, modules: list[DeepSpeedExperts], step: ExpertsStep | None) -> None:
    write_manifest(
        building,
        modules=[record_of(experts) for experts in modules],
        ranks=dist.get_world_size(),
        num_steps=step.adam.num_steps if step is not None else 0,
        clip=step.clipping.state_dict() if step is not None and step.clipping is not None else None,
    )
    if target.exists():
        shutil.rmtree(target)


@torch.no_grad()
def load(folder: Path, modules: list[DeepSpeedExperts], step: ExpertsStep | None, *, optimizer_states: bool) -> None:
    """Reads all pages of this rank from below ``folder``. A collective of all ranks.

    Without ``optimizer_states`` weights alone are loaded, and the optimizer begins anew.

    Raises:
        ValueError: on every rank, where the files are not whole or belong to another model.
    """
    all_or_none(partial(_load, folder, modules, step, optimizer_states), doing=f"loading {folder / FOLDER}")


def _load(folder: Path, modules: list[DeepSpeedExperts], step: ExpertsStep | None, optimizer_states: bool) -> None:
    reader = PagesReader(folder / FOLDER)
    _refuse_another_model(reader, modules)
    if step is not None:
        step.gradients.drop()
        step.adam.set_num_steps(reader.num_steps if optimizer_states else 0)
        if optimizer_states and step.clipping is not None and reader.clip is not None:
            step.clipping.load_state_dict(reader.clip)
    for experts in modules:
        kept: set[tuple[int, int]] = set()
        if step is not None and experts in step.adam.bindings:
            kept = set(step.adam.shards.owned(experts))
        for number in range(experts.num_experts):
            _ExpertLoader(reader, experts, number).load(kept, optimizer_states=optimizer_states)
    if step is not None and not optimizer_states:  # as DeepSpeed's masters, which begin with what the model computes
        step.adam.refresh_masters()


class _ExpertLoader:
    """Fills the pages of one expert."""

    def __init__(self, reader: PagesReader, experts: DeepSpeedExperts, number: int) -> None:
        self._reader, self._experts, self._number = reader, experts, number
        self._old = reader.modules[experts.path].layout()
        expert = experts.owned.start + number
        self._names = [page_name(experts.path, expert, slice_) for slice_ in range(self._old.num_slices)]
        self._planes = reader.planes(self._names[0])

    def load(self, kept: set[tuple[int, int]], *, optimizer_states: bool) -> None:
        """``kept``: pages whose optimizer state is this rank's."""
        parameters = "master" if "master" in self._planes else "weight"
        for slice_ in range(self._experts.layout.num_slices):
            name = (self._number, slice_)
            self._fill(Plane.WEIGHT, name, parameters)
            if name not in kept:
                continue
            if Plane.MASTER in self._experts.pages.dtypes:
                self._fill(Plane.MASTER, name, parameters)
            for plane in MOMENTS:
                saved = _PLANE_NAMES[plane]
                if optimizer_states and saved in self._planes:
                    self._fill(plane, name, saved)
                else:  # zeros
                    self._experts.manager.drop(self._present(plane, name))

    def _present(self, plane: Plane, name: tuple[int, int]) -> np.ndarray:
        ids = self._experts.page_ids(plane, [name])
        return ids if self._experts.manager.present(self._experts.pages, plane)[name] else ids[:0]

    def _fill(self, plane: Plane, name: tuple[int, int], saved: str) -> None:
        experts, reader = self._experts, self._reader
        experts.manager.create_ids(experts.pages, plane, experts.page_ids(plane, [name]))
        with experts.lease(plane, [name]) as lease:
            lease.mark_dirty()
            recut(
                experts.layout,
                name[1],
                old=self._old,
                read=lambda slice_: reader.page(self._names[slice_], saved),
                out=lease.page(*name),
            )


def _refuse_another_model(reader: PagesReader, modules: list[DeepSpeedExperts]) -> None:
    ours = {experts.path: experts for experts in modules}
    if ours.keys() != reader.modules.keys():
        different = sorted(ours.keys() ^ reader.modules.keys())
        raise ValueError(f"the checkpoint and the model have experts in different places: {', '.join(different[:4])}")
    for path, experts in ours.items():
        record = reader.modules[path]
        if record.layout().shape != experts.shape or record.num_experts != experts.all_experts:
            raise ValueError(
                f"{path}: the checkpoint has {record.num_experts} experts of {record.layout().shape}, the model "
                f"{experts.all_experts} of {experts.shape}"
            )


def tag_of(folder: Path, tag: str | None) -> str | None:
    """The tag given, or the one that ``latest`` names; None where there is neither."""
    latest = folder / "latest"
    if tag is not None:
        return str(tag)
    return latest.read_text().strip() if latest.is_file() else None


def check(folder: Path, *, paged: bool, stage: int, module_only: bool) -> None:
    """Refuses what ``load_checkpoint`` could not load: ``folder`` is that of a tag, ``stage`` the engine's ZeRO stage.

    An engine without ZeRO whose optimizer is partitioned nevertheless counts as stage 1.

    Raises:
        ValueError: no such folder, one without (whole) pages for a model with experts in pages, of an interrupted save,
        or of a ZeRO stage whose files are others.
    """
    if not folder.is_dir():
        found = sorted(path.name for path in folder.parent.glob("*/") if any(path.glob("*_states.pt")))
        raise ValueError(f"{folder} does not exist; {folder.parent} has {', '.join(found) or 'no checkpoint'}")
    if paged and not has_pages(folder):
        if (folder / FOLDER).is_dir():
            raise ValueError(f"{folder / FOLDER} has no manifest.json: the checkpoint is not whole")
        raise ValueError(
            f"{folder} was saved without megascale: DeepSpeed's files have the experts in a layout that only stock "
            "reads; load it in stock, save_pretrained() the model, and start from that"
        )
    saved = _stage_kind(folder)
    wanted = "ZeRO 3" if stage == 3 else "ZeRO 1 or 2" if stage else "no ZeRO"
    if saved != wanted and (not module_only or "ZeRO 3" in (saved, wanted)):
        raise ValueError(
            f"{folder} was saved under {saved} and this engine has {wanted}: DeepSpeed's own files load under theirs "
            "only; deepspeed_ext.elastic has checkpoints that load under every stage"
        )


def _stage_kind(folder: Path) -> str:
    """The ZeRO stages that DeepSpeed's files in a folder load under."""
    if any(folder.glob("zero_pp_rank_*_model_states.pt")):
        return "ZeRO 3"
    return "ZeRO 1 or 2" if any(folder.glob("*zero_pp_rank_*_optim_states.pt")) else "no ZeRO"


@contextmanager
def hidden(run: Run) -> Iterator[None]:
    """While it lasts, state dicts of modules have no experts: a checkpoint keeps them in files of their own."""
    run.hidden = True
    try:
        yield
    finally:
        run.hidden = False

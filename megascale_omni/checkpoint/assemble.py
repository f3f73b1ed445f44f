"""A checkpoint put together from tensors that are read one by one, without a model: what converters write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megascale_omni.checkpoint import datafile
from megascale_omni.checkpoint.datafile import Entry, places, read_tensor
from megascale_omni.checkpoint.digests import Data
from megascale_omni.checkpoint.filesystem import LocalFileSystem
from megascale_omni.checkpoint.pages import PageAt
from megascale_omni.checkpoint.request import DENSE_MPU, EXPERTS_MPU, SaveRequest, mpu_folder
from megascale_omni.checkpoint.store import Store
from megascale_omni.checkpoint.writing import Part, commit
from megascale_omni.paging.layout import ExpertShape


@dataclass(frozen=True)
class Source:
    """A tensor that is read when it is written: dtype, shape, how."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    def entry(self, name: str) -> Entry:
        """The tensor in a data file. RuntimeError where what is read is not what was announced."""

        def data() -> Data:
            tensor = self.read()
            if tensor.dtype is not self.dtype or tuple(tensor.shape) != self.shape:
                raise RuntimeError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}, announced was {self.dtype} {self.shape}"
                )
            return read_tensor(tensor)

        return Entry(name, self.dtype, self.shape, [data])


@dataclass(frozen=True)
class PageSource:
    """A page: its place, the neuron behind its last one, and its planes by label, flat."""

    at: PageAt
    stop: int
    planes: Mapping[str, Source]


@dataclass(frozen=True)
class ModuleSource:
    """A module of experts.

    ``groups`` are the optimizer's groups of its weights and biases, None where frozen; ``heat`` what each rank of a run
    had of its experts' heat.
    """

    shape: ExpertShape
    num_experts: int
    style: str
    groups: tuple[int, int | None] | None = None
    heat: Sequence[Mapping[str, Any]] = ()


@dataclass
class Assembly:
    """What a checkpoint is to hold.

    Attributes:
        dense: tensors by the names under which a run looks for them. pages, modules: experts. optimizer: steps, name of
        the arithmetic, and settings of each group, None for weights alone; every page has seen all steps.
        values, layout, versions: of the manifest.
    """

    step: int
    dense: dict[str, Source] = field(default_factory=dict)
    pages: list[PageSource] = field(default_factory=list)
    modules: dict[str, ModuleSource] = field(default_factory=dict)
    optimizer: tuple[int, str, Sequence[Mapping[str, Any]]] | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


def write(root: Path, tag: str, assembly: Assembly) -> Path:
    """Writes ``root/tag`` as every save does: whole and on disk, or not there.

    Raises:
        OSError: of the file system. ValueError: of what the sources read, or a tag that cannot be.
    """
    store = Store(root, files=LocalFileSystem())
    draft = store.draft_of(tag)
    store.draft(tag, [mpu_folder(DENSE_MPU), mpu_folder(EXPERTS_MPU)])
    try:
        records = []
        for mpu, planned in ((DENSE_MPU, _dense), (EXPERTS_MPU, _experts)):
            path = f"{mpu_folder(mpu)}/00000.safetensors"
            entries, index = planned(assembly, path)
            records.append(datafile.write(store.files, draft, path, entries, digest_name=store.digest))
            records.append(store.write(draft, path.removesuffix(".safetensors") + ".json", index))
    except BaseException:
        store.discard_draft(draft)
        store.release()
        raise
    request = SaveRequest(
        tag=tag, step=assembly.step, values=assembly.values, layout=assembly.layout, versions=assembly.versions
    )
    try:
        return commit(store, request, draft, [Part(records, {"rank": 0, "converted": True}, {})]).folder
    finally:
        store.release()


def _dense(assembly: Assembly, path: str) -> tuple[list[Entry], bytes]:
    entries = [source.entry(name) for name, source in assembly.dense.items()]
    index = [
        {
            "name": entry.name,
            "global_shape": entry.shape,
            "offset": (0,) * len(entry.shape),
            "shape": entry.shape,
            "place": place.as_list(),
        }
        for entry, place in zip(entries, places(path, entries), strict=True)
    ]
    return entries, json.dumps(index).encode()


def _experts(assembly: Assembly, path: str) -> tuple[list[Entry], bytes]:
    named = [
        (page, label, source.entry(f"{page.at[0]}|{page.at[1]}|{page.at[2]}|{label}"))
        for page in assembly.pages
        for label, source in page.planes.items()
    ]
    entries = [entry for _, _, entry in named]
    found: dict[PageAt, dict[str, list[object]]] = {page.at: {} for page in assembly.pages}
    for (page, label, _), place in zip(named, places(path, entries), strict=True):
        found[page.at][label] = place.as_list()
    steps = 0 if assembly.optimizer is None else assembly.optimizer[0]
    modules = {
        name: {
            "hidden": module.shape.hidden,
            "ffn": module.shape.ffn,
            "gated": module.shape.gated,
            "bias": module.shape.bias,
            "num_experts": module.num_experts,
            "style": module.style,
            "groups": module.groups,
            **({"heat": list(module.heat)} if module.heat else {}),
        }
        for name, module in assembly.modules.items()
    }
    optimizer = None
    if assembly.optimizer is not None:
        groups = [{"settings": dict(s), "base": steps, "records": []} for s in assembly.optimizer[2]]
        optimizer = {"num_steps": steps, "arithmetic": assembly.optimizer[1], "groups": groups}
    pages = [[*page.at, page.stop, steps, found[page.at]] for page in assembly.pages]
    return entries, json.dumps({"modules": modules, "pages": pages, "optimizer": optimizer}).encode()

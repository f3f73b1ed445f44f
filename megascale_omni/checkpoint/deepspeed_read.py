"""DeepSpeed's own checkpoints into ours: any ZeRO stage and number of ranks loads the result."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megascale_omni.checkpoint.assemble import Assembly, ModuleSource, PageSource, Source, write
from megascale_omni.checkpoint.deepspeed_files import MASTER, MOMENTS, tag_folder
from megascale_omni.checkpoint.deepspeed_universal import Files, open_files
from megascale_omni.checkpoint.hf_experts import HfExperts, add_module, find_experts
from megascale_omni.checkpoint.megatron_keys import MODEL, OPTIMIZER
from megascale_omni.checkpoint.pages_file import FOLDER, PagesReader, has_pages, page_name
from megascale_omni.paging.layout import DEFAULT_PAGE_BYTES

logger = logging.getLogger(__name__)

_OWN = frozenset(
    (
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
        *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
        *("global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version", "num_experts"),
        *("checkpoint_parallel_dimensions", "universal_checkpoint_info", "ds_autoep_layers"),
    )
)
"""What DeepSpeed puts into the file of a model; the rest is the script's client state."""
_SETTINGS = ("lr", "weight_decay", "betas", "eps")
_LABELS = {"moment1": MOMENTS[0], "moment2": MOMENTS[1], "master": MASTER}


def from_deepspeed(
    source: Path,
    root: Path,
    *,
    tag: str | None = None,
    style: str | None = None,
    page_bytes: int = DEFAULT_PAGE_BYTES,
) -> Path:
    """Writes the checkpoint in ``source`` (a tag's folder, or one with ``latest``) as ``root/tag``.

    ``style``: see [Note: naming styles] of the paging's names; told from the shapes where they tell it.

    Raises:
        ValueError: what the files' readers refuse, experts that are not whole, a style that must be given.
    """
    files = open_files(tag_folder(source))
    model = files.model
    step = int(model["global_steps"])
    assembly = Assembly(
        step=step,
        values={
            "client": _client(model, files.folder),
            "position": {
                "global_steps": step,
                "global_samples": int(model.get("global_samples", 0)),
                "skipped_steps": int(model.get("skipped_steps", 0)),
            },
            "schedule": _plain(model.get("lr_scheduler"), f"{files.folder}: the state of the learning-rate schedule"),
            "steps": files.steps,
            "groups": [{key: _listed(group[key]) for key in _SETTINGS if key in group} for group in files.groups],
            "clipping": None,
        },
        layout={"zero_stage": int(files.stage), "world_size": files.num_ranks},
        versions={"deepspeed": str(model.get("ds_version", "unknown"))},
    )
    frozen = files.frozen()
    modules = find_experts({**files.shapes, **frozen}, files.folder)
    of_experts = {f"{path}.{name}" for path, shapes in modules.items() for name in shapes}
    for name in files.shapes:
        if name not in of_experts:
            assembly.dense.update(_trained(files, name))
    for name, shape in frozen.items():
        if name not in of_experts:
            assembly.dense[MODEL + name] = Source(files.dtype(name), shape, partial(files.read_frozen, name))
    for name in model["buffer_names"]:
        buffer = model["module"][name]
        assembly.dense[MODEL + name] = Source(buffer.dtype, tuple(buffer.shape), partial(_same, buffer))
    for path, shapes in modules.items():
        add_module(assembly, _experts(files, path, shapes), source=files.folder, style=style, page_bytes=page_bytes)
    settings, steps = assembly.values["groups"], files.steps
    if has_pages(files.folder):  # of a run with experts in pages, which are beside the rest
        pages = PagesReader(files.folder / FOLDER)
        _add_pages(assembly, files, pages)
        steps, assembly.values = pages.num_steps, {**assembly.values, "clipping": pages.clip}
    assembly.optimizer = steps, "torch_adamw", settings
    return write(root, tag or files.folder.name, assembly)


def _add_pages(assembly: Assembly, files: Files, pages: PagesReader) -> None:
    """Experts that were in pages; of bf16 weights there are only the masters that every step makes them of."""
    for path, record in pages.modules.items():
        layout = record.layout()
        stepped = any(label in pages.planes(page_name(path, 0, 0)) for label in (*MOMENTS, "master"))
        groups = (0, 0 if record.bias else None) if stepped else None
        assembly.modules[path] = ModuleSource(layout.shape, record.num_experts, record.style, groups)
        for expert in range(record.num_experts):
            for slice_ in range(layout.num_slices):
                name, neurons = page_name(path, expert, slice_), layout.neurons(slice_)
                labels, numel = pages.planes(name), (layout.page_numel(slice_),)
                dtype = files.dtype(next(iter(files.shapes)))
                read = partial(pages.page, name, "weight" if "weight" in labels else "master")
                planes = {"weight": Source(dtype, numel, partial(_rounded, read, dtype))}
                for ours, theirs in {**_LABELS, "master": "master"}.items():
                    if theirs in labels:
                        planes[ours] = Source(torch.float32, numel, partial(pages.page, name, theirs))
                assembly.pages.append(PageSource((path, expert, neurons.start), neurons.stop, planes))


def _rounded(read: Callable[[], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return read().to(dtype)


def _trained(files: Files, name: str) -> Iterator[tuple[str, Source]]:
    shape, dtype = files.shapes[name], files.dtype(name)
    yield MODEL + name, Source(dtype, shape, partial(_weight, files, name, shape, dtype))
    if dtype is not torch.float32:
        yield f"{OPTIMIZER}param.{name}", Source(torch.float32, shape, partial(_whole, files, name, MASTER, shape))
    for kind in MOMENTS if files.has_moments else ():
        yield f"{OPTIMIZER}{kind}.{name}", Source(torch.float32, shape, partial(_whole, files, name, kind, shape))


def _whole(files: Files, name: str, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    return files.read(name, kind).view(shape)


def _weight(files: Files, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """As the model has it; under ZeRO 3, which does not store it, as every step makes it of its master."""
    stored = files.model["module"].get(name)
    if isinstance(stored, torch.Tensor) and tuple(stored.shape) == shape:
        return stored
    return _whole(files, name, MASTER, shape).to(dtype)


def _experts(files: Files, path: str, shapes: dict[str, tuple[int, ...]]) -> HfExperts:
    names = {name: f"{path}.{name}" for name in shapes}
    dtype = files.dtype(names["down_proj"]) if "down_proj" in names else torch.float32
    trained = [name for name in names.values() if name in files.shapes]
    if trained and len(trained) < len(names):
        raise ValueError(f"{files.folder}: some tensors of {path} are frozen, and some are not")
    if not trained:
        return HfExperts(path, shapes, dtype, lambda label, name, expert: _slice(files, names[name], expert))
    labels = ["weight", *(("master",) if dtype is not torch.float32 else ())]
    labels += ["moment1", "moment2"] if files.has_moments else []

    def read(label: str, name: str, expert: int) -> torch.Tensor:
        one = shapes[name][1:]
        numel = torch.Size(one).numel()
        stored = files.model["module"].get(names[name])
        if label == "weight" and isinstance(stored, torch.Tensor) and tuple(stored.shape) == shapes[name]:
            return stored[expert : expert + 1]
        kind = _LABELS.get(label, MASTER)
        flat = files.read(names[name], kind, expert * numel, (expert + 1) * numel).view(1, *one)
        return flat.to(dtype) if label == "weight" else flat

    biases = names.get("down_proj_bias")
    groups = files.group_of[names["down_proj"]], None if biases is None else files.group_of[biases]
    return HfExperts(path, shapes, dtype, read, labels, groups)


def _slice(files: Files, name: str, expert: int) -> torch.Tensor:
    return files.read_frozen(name)[expert : expert + 1]


def _client(model: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The script's own values, those that are plain."""
    found: dict[str, Any] = {}
    for key in sorted(model.keys() - _OWN):
        try:
            found[key] = json.loads(json.dumps(model[key]))
        except TypeError:
            logger.warning("%s: %s of the client state is not plain and is left out", folder, key)
    return found


def _plain(value: object, what: str) -> Any:  # noqa: ANN401 - what JSON gives
    try:
        return json.loads(json.dumps(value))
    except TypeError as error:
        raise ValueError(f"{what} cannot be converted: {error}") from error


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor

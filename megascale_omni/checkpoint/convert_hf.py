"""Checkpoints of models with Hugging Face's names to Hugging Face's folders and back: weights, tensor by tensor.

    FOLDER/model.safetensors                   or model-00001-of-00003.safetensors ... with model.safetensors.index.json
    FOLDER/config.json, tokenizer files        copied from another folder: they are not in a checkpoint

Experts are one tensor a module and matrix there (``gate_up_proj`` [E, 2f, h] and so on), pages here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch

from megascale_omni.checkpoint import datafile
from megascale_omni.checkpoint.assemble import Assembly, Source, write
from megascale_omni.checkpoint.datafile import NAMES, Entry
from megascale_omni.checkpoint.digests import default_name
from megascale_omni.checkpoint.filesystem import LocalFileSystem, write_file
from megascale_omni.checkpoint.hf_experts import HfExperts, add_module, find_experts
from megascale_omni.checkpoint.hf_view import hf_view
from megascale_omni.checkpoint.opening import Opened
from megascale_omni.paging.layout import DEFAULT_PAGE_BYTES
from megascale_omni.paging.planes import Plane

MODEL = "model."
"""What a run's own names begin with in a checkpoint."""
SHARD_BYTES = 5 << 30


# -- to a folder ------------------------------------------------------------------------------------------------------


def to_hf(opened: Opened, target: Path, *, like: Path | None = None, shard_bytes: int = SHARD_BYTES) -> Path:
    """Writes a folder that ``from_pretrained`` reads; ``like`` is one that has the configuration.

    Raises:
        ValueError: tensors that have no place in a Hugging Face model, or a target that is there.
    """
    if target.exists():
        raise ValueError(f"{target} exists; give a folder that does not")
    entries = list(_entries(opened))
    files = LocalFileSystem()
    draft = target.with_name(f".draft-{target.name}")
    if draft.exists():
        files.remove(draft)
    draft.parent.mkdir(parents=True, exist_ok=True)
    files.make_folder(draft)
    _write_shards(draft, entries, shard_bytes)
    for path in sorted(like.iterdir()) if like is not None else []:
        if path.is_file() and ".safetensors" not in path.name and path.suffix in (".json", ".txt", ".model", ".jinja"):
            shutil.copyfile(path, draft / path.name)
    files.sync_folder(draft)
    files.rename(draft, target)
    files.sync_folder(target.parent)
    return target


def _entries(opened: Opened) -> Iterator[Entry]:
    view = hf_view(opened)
    for name, source in view.dense.items():
        if name.startswith(MODEL):
            yield source.entry(name.removeprefix(MODEL))
    for path in view.modules:
        for name, source in view.experts(path, Plane.WEIGHT):
            yield source.entry(f"{path}.{name}")


def _write_shards(folder: Path, entries: list[Entry], shard_bytes: int) -> None:
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(e.nbytes for e in shards[-1]) + entry.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    files, digest = LocalFileSystem(), default_name()
    if len(shards) == 1:
        datafile.write(files, folder, "model.safetensors", shards[0], digest_name=digest)
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        datafile.write(files, folder, name, shard, digest_name=digest)
        weight_map.update({entry.name: name for entry in shard})
    index = {"metadata": {"total_size": sum(entry.nbytes for entry in entries)}, "weight_map": weight_map}
    write_file(files, folder / "model.safetensors.index.json", json.dumps(index, indent=1).encode())


# -- from a folder ----------------------------------------------------------------------------------------------------


def from_hf(
    source: Path, root: Path, tag: str, *, style: str | None = None, page_bytes: int = DEFAULT_PAGE_BYTES
) -> Path:
    """Writes ``root/tag`` with the weights of a Hugging Face folder; to be loaded without an optimizer.

    ``style``: see [Note: naming styles]; told from the shapes where they tell it.

    Raises:
        ValueError: no weights, damaged files, experts that are not whole, or a style that must be given.
    """
    tensors = _mapped(source)
    assembly = Assembly(step=0, values={"run": {}, "groups": [], "optimizer": False, "rng": False})
    modules = find_experts({name: tuple(tensor.shape) for name, tensor in tensors.items()}, source)
    of_experts = {f"{path}.{name}" for path, shapes in modules.items() for name in shapes}
    for name, tensor in tensors.items():
        if name not in of_experts:
            assembly.dense[MODEL + name] = Source(tensor.dtype, tuple(tensor.shape), partial(_same, tensor))
    for path, shapes in modules.items():
        experts = HfExperts(
            path, shapes, tensors[f"{path}.{next(iter(shapes))}"].dtype, partial(_expert, tensors, path)
        )
        add_module(assembly, experts, source=source, style=style, page_bytes=page_bytes)
    return write(root, tag, assembly)


def _expert(tensors: Mapping[str, torch.Tensor], path: str, label: str, name: str, expert: int) -> torch.Tensor:
    return tensors[f"{path}.{name}"][expert : expert + 1]


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _mapped(source: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, where their bytes are."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        raw = np.memmap(path, np.uint8, mode="c")
        length = int.from_bytes(raw[:8].tobytes(), "little")
        try:
            header = json.loads(raw[8 : 8 + length].tobytes())
            for name, item in header.items():
                if name != "__metadata__":
                    begin, end = (8 + length + offset for offset in item["data_offsets"])
                    flat = torch.from_numpy(np.asarray(raw[begin:end]))
                    found[name] = flat.view(NAMES[item["dtype"]]).view(item["shape"])
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ValueError(f"{path} is damaged, or no safetensors file: {error}") from error
    if not found:
        raise ValueError(f"{source} has no weights (*.safetensors)")
    return found

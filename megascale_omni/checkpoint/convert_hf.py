"""Checkpoints of models with Hugging Face's names to Hugging Face's folders and back: weights, tensor by tensor.

    FOLDER/model.safetensors                   or model-00001-of-00003.safetensors ... with model.safetensors.index.json
    FOLDER/config.json, tokenizer files        copied from another folder: they are not in a checkpoint

Experts are one tensor a module and matrix there (``gate_up_proj`` [E, 2f, h] and so on), pages here.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import cast, get_args

import numpy as np
import torch

from megascale_omni.checkpoint import datafile
from megascale_omni.checkpoint.assemble import Assembly, ModuleSource, PageSource, Source, write
from megascale_omni.checkpoint.datafile import NAMES, Entry
from megascale_omni.checkpoint.digests import default_name
from megascale_omni.checkpoint.filesystem import LocalFileSystem, write_file
from megascale_omni.checkpoint.opening import Opened
from megascale_omni.checkpoint.pages_load import planes_of
from megascale_omni.paging.layout import DEFAULT_PAGE_BYTES, ExpertShape, PageLayout
from megascale_omni.paging.names import NamedTensors, NamingStyle
from megascale_omni.paging.planes import Plane

MODEL = "model."
"""What a run's own names begin with in a checkpoint."""
SHARD_BYTES = 5 << 30
_EXPERTS = re.compile(r"(?:(?P<path>.*)\.)?(?P<name>(?:gate_up|up|down)_proj)(?P<bias>_bias)?")
_PER_EXPERT = re.compile(r".*\.experts\.\d+\..*")


# -- to a folder ------------------------------------------------------------------------------------------------------


def to_hf(opened: Opened, target: Path, *, like: Path | None = None, shard_bytes: int = SHARD_BYTES) -> Path:
    """Writes a folder that ``from_pretrained`` reads; ``like`` is one that has the configuration.

    Raises:
        ValueError: a checkpoint with another framework's names, or a target that is there.
    """
    if "megatron-core" in opened.manifest.versions:
        raise ValueError(
            f"checkpoint {opened.folder} has Megatron's names and cuts of tensors, Hugging Face's models have others; "
            "convert it --to torch_dist, and that with the tool that made the Megatron model"
        )
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
    for name, parts in opened.dense.tensors.items():
        if name.startswith(MODEL):
            dtype, shape = NAMES[parts[0].place.dtype], parts[0].global_shape
            yield Source(dtype, shape, partial(opened.dense.read, name)).entry(name.removeprefix(MODEL))
    for path, module in opened.pages.modules.items():
        if not module.style.startswith("hf"):
            style = module.style or "not stored by the build that saved it"
            raise ValueError(f"checkpoint {opened.folder}: the names of {path} are not Hugging Face's ({style})")
        layout = PageLayout(module.shape, module.shape.ffn)
        names = NamedTensors(layout=layout, num_experts=module.num_experts, style=cast(NamingStyle, module.style))
        dtype = NAMES[opened.pages.pages[path, 0][0].planes["weight"].dtype]
        for tensor in names.tensors():
            read = partial(whole_experts, opened, path, names, tensor.name, plane=Plane.WEIGHT, dtype=dtype)
            yield Source(dtype, tensor.shape, read).entry(f"{path}.{tensor.name}")


def whole_experts(
    opened: Opened, path: str, names: NamedTensors, name: str, *, plane: Plane, dtype: torch.dtype
) -> torch.Tensor:
    """A named tensor of all experts of a module, its steps caught up; zeros where the plane is not stored."""
    tensor = next(t for t in names.tensors() if t.name == name)
    out = torch.zeros(tensor.shape, dtype=dtype)
    neurons = slice(0, names.layout.shape.ffn)
    for expert in range(names.num_experts):
        if not any(item.tensor.name == name for item in names.of_expert(expert)):
            continue
        planes = planes_of(opened.pages, (path, expert), neurons, catch_up=True)
        page = planes.get(plane)
        if page is None and plane is Plane.MASTER:
            page = planes[Plane.WEIGHT].float()
        if page is not None:
            names.gather({(expert, 0): page}, {name: out})
    return out


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
    modules: dict[str, dict[str, torch.Tensor]] = {}
    assembly = Assembly(step=0, values={"run": {}, "groups": [], "optimizer": False, "rng": False})
    for name, tensor in tensors.items():
        match = _EXPERTS.fullmatch(name)
        if match is not None and tensor.dim() == (2 if match["bias"] else 3):
            modules.setdefault(match["path"] or "", {})[match["name"] + (match["bias"] or "")] = tensor
        elif _PER_EXPERT.fullmatch(name):
            raise ValueError(
                f"{source} has each expert's tensors by themselves ({name}); load it with transformers 5 and "
                "save_pretrained it: then they are one tensor a module"
            )
        else:
            assembly.dense[MODEL + name] = Source(tensor.dtype, tuple(tensor.shape), partial(_same, tensor))
    for path, experts in modules.items():
        _add_module(assembly, source, path, experts, style=style, page_bytes=page_bytes)
    return write(root, tag, assembly)


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


def _add_module(
    assembly: Assembly,
    source: Path,
    path: str,
    experts: Mapping[str, torch.Tensor],
    *,
    style: str | None,
    page_bytes: int,
) -> None:
    style = style or _style_of(source, path, experts)
    if style not in get_args(NamingStyle) or not style.startswith("hf"):
        raise ValueError(f"style {style!r} is none of Hugging Face's: hf, hf_transposed, hf_gpt_oss, hf_interleaved")
    gated = "gate_up_proj" in experts
    down = experts["down_proj"]
    ffn_axis = 2 if style in ("hf", "hf_interleaved") else 1
    count, ffn, hidden = down.shape[0], down.shape[ffn_axis], down.shape[3 - ffn_axis]
    shape = ExpertShape(hidden=hidden, ffn=ffn, gated=gated, bias="down_proj_bias" in experts)
    layout = PageLayout.for_page_bytes(shape, page_bytes=page_bytes, dtype=down.dtype)
    names = NamedTensors(layout=layout, num_experts=count, style=cast(NamingStyle, style))
    for tensor in names.tensors():
        if tensor.name not in experts or tuple(experts[tensor.name].shape) != tensor.shape:
            here = tuple(experts[tensor.name].shape) if tensor.name in experts else "missing"
            raise ValueError(f"{source}: {path}.{tensor.name} is {here}, style {style} needs {tensor.shape}")
    assembly.modules[path] = ModuleSource(shape, count, style)
    for expert in range(count):
        for slice_ in range(layout.num_slices):
            neurons = layout.neurons(slice_)
            read: Callable[[], torch.Tensor] = partial(_page, names, experts, expert, slice_, down.dtype)
            weight = Source(down.dtype, (layout.page_numel(slice_),), read)
            assembly.pages.append(PageSource((path, expert, neurons.start), neurons.stop, {"weight": weight}))


def _page(
    names: NamedTensors, tensors: Mapping[str, torch.Tensor], expert: int, slice_: int, dtype: torch.dtype
) -> torch.Tensor:
    page = torch.empty(names.layout.page_numel(slice_), dtype=dtype)
    for item in names.of_page(expert, slice_):
        names.layout.part(page, slice_, item.part).copy_(item.select(tensors[item.tensor.name]))
    return page


def _style_of(source: Path, path: str, experts: Mapping[str, torch.Tensor]) -> str:
    """``hf`` or ``hf_transposed``, as the shapes of the two matrices fit together."""
    first, down = experts.get("gate_up_proj", experts.get("up_proj")), experts.get("down_proj")
    if first is None or down is None:
        raise ValueError(f"{source}: {path} has only {', '.join(sorted(experts))} of its experts' tensors")
    wide = 2 if "gate_up_proj" in experts else 1
    fits = [
        name
        for name, ffn, hidden in (("hf", down.shape[2], down.shape[1]), ("hf_transposed", down.shape[1], down.shape[2]))
        if tuple(first.shape[1:]) == ((wide * ffn, hidden) if name == "hf" else (hidden, wide * ffn))
    ]
    if len(fits) != 1:
        what = "both orientations fit" if fits else "no known orientation fits"
        raise ValueError(
            f"{source}: {path} has gate_up_proj {tuple(first.shape)} and down_proj {tuple(down.shape)}: {what}; say "
            "which with --style hf, hf_transposed, hf_gpt_oss or hf_interleaved"
        )
    return fits[0]

"""A checkpoint as Hugging Face's models name its tensors, whoever saved it: what converters to other formats read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from megascale_omni.checkpoint.assemble import Source
from megascale_omni.checkpoint.boxes import Box, whole
from megascale_omni.checkpoint.datafile import NAMES
from megascale_omni.checkpoint.megatron_keys import MODEL, MOMENTS, OBJECT, OPTIMIZER, RNG, is_stacked, numbered
from megascale_omni.checkpoint.model_names import Attention, ModelNames, Rule, path_in_hf, split
from megascale_omni.checkpoint.opening import Opened
from megascale_omni.checkpoint.pages_load import planes_of
from megascale_omni.paging.layout import PageLayout
from megascale_omni.paging.names import NamedTensors, NamingStyle
from megascale_omni.paging.planes import Plane

KINDS = (MODEL, f"{OPTIMIZER}param.", *(f"{OPTIMIZER}{moment}." for moment in MOMENTS))
"""What dense tensors' names begin with: weights, masters, moments."""
_STEP = f"{OPTIMIZER}step."


@dataclass(frozen=True)
class HfView:
    """Tensors of a checkpoint by Hugging Face's names.

    Attributes:
        dense: by one of :data:`KINDS` and name. modules: path of experts -> their path in the checkpoint.
        steps: that the dense optimizer has made; 0 where it is not stored.
    """

    opened: Opened
    dense: Mapping[str, Source]
    modules: Mapping[str, str]
    steps: int

    def names(self, path: str) -> NamedTensors:
        """The tensors of a module's experts. ValueError where they have no such names."""
        stored = self.modules[path]
        module = self.opened.pages.modules[stored]
        style = "hf" if is_megatrons(self.opened) else module.style
        if not style.startswith("hf"):
            style = style or "not stored by the build that saved it"
            raise ValueError(f"checkpoint {self.opened.folder}: the names of {path} are not Hugging Face's ({style})")
        layout = PageLayout(module.shape, module.shape.ffn)
        return NamedTensors(layout=layout, num_experts=module.num_experts, style=cast(NamingStyle, style))

    def dtype(self, path: str) -> torch.dtype:
        """Of a module's weights."""
        return NAMES[self.opened.pages.pages[self.modules[path], 0][0].planes["weight"].dtype]

    def experts(self, path: str, plane: Plane) -> Iterator[tuple[str, Source]]:
        """The tensors of a module's experts: their weights, or what the optimizer keeps of them."""
        names = self.names(path)
        dtype = self.dtype(path) if plane is Plane.WEIGHT else torch.float32
        for tensor in names.tensors():
            read = partial(whole_experts, self.opened, self.modules[path], names, tensor.name, plane=plane, dtype=dtype)
            yield tensor.name, Source(dtype, tensor.shape, read)


def is_megatrons(opened: Opened) -> bool:
    """Whether a Megatron run saved it, so that names and cuts are Megatron's."""
    return "megatron-core" in opened.manifest.versions


def hf_view(opened: Opened) -> HfView:
    """The view of a checkpoint.

    Raises:
        ValueError: tensors of a Megatron run that have no place in a Hugging Face model, by name.
    """
    if is_megatrons(opened):
        modules = {path_in_hf(path): path for path in opened.pages.modules}
        return HfView(opened, dict(_of_megatron(opened)), modules, _steps(opened))
    dense = {
        name: Source(NAMES[parts[0].place.dtype], parts[0].global_shape, partial(opened.dense.read, name))
        for name, parts in opened.dense.tensors.items()
        if name.startswith(KINDS)
    }
    return HfView(opened, dense, {path: path for path in opened.pages.modules}, _steps(opened))


def _steps(opened: Opened) -> int:
    if "steps" in opened.manifest.values:
        return int(opened.manifest.values["steps"])
    names = [name for name in opened.dense.tensors if name.startswith(_STEP)]
    counts = {int(step) for name in names for step in opened.dense.read(name).reshape(-1).tolist()}
    if len(counts) > 1:
        raise ValueError(
            f"checkpoint {opened.folder}: its parameters were stepped {', '.join(map(str, sorted(counts)))} times, and "
            "a DeepSpeed run has one number for all: take the weights alone, with convert --to hf"
        )
    return max(counts, default=0)


def _of_megatron(opened: Opened) -> Iterator[tuple[str, Source]]:
    if "args" not in opened.manifest.values.get("run", {}):
        raise ValueError(f"checkpoint {opened.folder} does not say how many attention heads its model has")
    attention = Attention.of_args(opened.manifest.values["run"]["args"])
    stored = opened.dense.tensors
    names = ModelNames(gated_shared=any("shared_experts.gate_weight" in name for name in stored))
    strange = []
    for name, parts in stored.items():
        kind = next((kind for kind in KINDS if name.startswith(kind)), None)
        if kind is None:
            if not name.startswith((RNG, OBJECT, _STEP)):
                strange.append(name)
            continue
        dtype, shape = NAMES[parts[0].place.dtype], parts[0].global_shape
        for key, box in _layers(name.removeprefix(kind), shape):
            found = names.find(key)
            if found is None:
                strange.append(name)
                break
            rule, theirs = found
            inner = box.shape[1:] if is_stacked(name.removeprefix(kind)) else box.shape
            cut = split(rule, torch.empty(inner, device="meta"), attention)
            for index, (part, to) in enumerate(zip(cut, theirs, strict=True)):
                read = partial(_part, opened, name, box, rule, index, attention)
                yield kind + to, Source(dtype, tuple(part.shape), read)
    if strange:
        raise ValueError(
            f"checkpoint {opened.folder} has {', '.join(sorted(strange)[:3])}, which a Hugging Face model has no place "
            "for: norms with biases, learned positions and attention of other kinds are not converted"
        )


def _layers(key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Box]]:
    """A tensor of one layer, or of all of them layer by layer: key with the number in it, and where it lies."""
    if not is_stacked(key):
        yield key, whole(shape)
        return
    for layer in range(shape[0]):
        yield numbered(key, layer), Box((layer, *(0,) * (len(shape) - 1)), (1, *shape[1:]))


def _part(opened: Opened, name: str, box: Box, rule: Rule, index: int, attention: Attention) -> torch.Tensor:
    tensor = opened.dense.read(name, box)
    stacked = is_stacked(name.removeprefix(next(kind for kind in KINDS if name.startswith(kind))))
    return split(rule, tensor[0] if stacked else tensor, attention)[index].contiguous()


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

"""Experts as Hugging Face has them, one tensor a module and matrix ([E, 2f, h] ...), into a checkpoint's pages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, cast, get_args

import torch

from megascale_omni.checkpoint.assemble import Assembly, ModuleSource, PageSource, Source
from megascale_omni.paging.layout import ExpertShape, PageLayout
from megascale_omni.paging.names import NamedTensors, NamingStyle

Shapes = Mapping[str, tuple[int, ...]]
_EXPERTS = re.compile(r"(?:(?P<path>.*)\.)?(?P<name>(?:gate_up|up|down)_proj)(?P<bias>_bias)?")
_PER_EXPERT = re.compile(r".*\.experts\.\d+\..*")


class ReadExpert(Protocol):
    """Reads a plane (``weight``, ``master``, ``moment1``, ``moment2``) of one expert in a named tensor: [1, ...]."""

    def __call__(self, label: str, name: str, expert: int) -> torch.Tensor: ...


@dataclass(frozen=True)
class HfExperts:
    """A module of experts.

    Attributes:
        path: of the module. shapes: of its tensors, by name in the module. dtype: of weights; other planes are fp32.
        read: one expert's part of a tensor. labels: planes that there are. groups: of its weights and its biases in
        the optimizer; None where they have none.
    """

    path: str
    shapes: Shapes
    dtype: torch.dtype
    read: ReadExpert
    labels: Sequence[str] = ("weight",)
    groups: tuple[int, int | None] | None = None


def find_experts(shapes: Shapes, source: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """Modules of experts among a model's tensors: path -> name in the module -> shape.

    Raises:
        ValueError: experts that are not one tensor a module.
    """
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        match = _EXPERTS.fullmatch(name)
        if match is not None and len(shape) == (2 if match["bias"] else 3):
            modules.setdefault(match["path"] or "", {})[match["name"] + (match["bias"] or "")] = shape
        elif _PER_EXPERT.fullmatch(name):
            raise ValueError(
                f"{source} has each expert's tensors by themselves ({name}); load it with transformers 5 and "
                "save_pretrained it: then they are one tensor a module"
            )
    return modules


def add_module(
    assembly: Assembly, experts: HfExperts, *, source: Path, style: str | None = None, page_bytes: int
) -> None:
    """Adds a module's pages; ``source`` is named in errors.

    Raises:
        ValueError: experts that are not whole, or a style that must be given.
    """
    shapes, path = experts.shapes, experts.path
    style = style or _style_of(source, path, shapes)
    if style not in get_args(NamingStyle) or not style.startswith("hf"):
        raise ValueError(f"style {style!r} is none of Hugging Face's: hf, hf_transposed, hf_gpt_oss, hf_interleaved")
    down = shapes["down_proj"]
    ffn_axis = 2 if style in ("hf", "hf_interleaved") else 1
    count, ffn, hidden = down[0], down[ffn_axis], down[3 - ffn_axis]
    shape = ExpertShape(hidden=hidden, ffn=ffn, gated="gate_up_proj" in shapes, bias="down_proj_bias" in shapes)
    layout = PageLayout.for_page_bytes(shape, page_bytes=page_bytes, dtype=experts.dtype)
    for tensor in NamedTensors(layout=layout, num_experts=count, style=cast(NamingStyle, style)).tensors():
        if shapes.get(tensor.name) != tensor.shape:
            here = shapes.get(tensor.name, "missing")
            raise ValueError(f"{source}: {path}.{tensor.name} is {here}, style {style} needs {tensor.shape}")
    assembly.modules[path] = ModuleSource(shape, count, style, experts.groups)
    one = NamedTensors(layout=layout, num_experts=1, style=cast(NamingStyle, style))
    for expert in range(count):
        for slice_ in range(layout.num_slices):
            neurons, numel = layout.neurons(slice_), layout.page_numel(slice_)
            planes = {}
            for label in experts.labels:
                dtype = experts.dtype if label == "weight" else torch.float32
                read = partial(_page, one, partial(experts.read, label), expert, slice_, dtype)
                planes[label] = Source(dtype, (numel,), read)
            assembly.pages.append(PageSource((path, expert, neurons.start), neurons.stop, planes))


class _ReadTensor(Protocol):
    def __call__(self, name: str, expert: int) -> torch.Tensor: ...


def _page(names: NamedTensors, read: _ReadTensor, expert: int, slice_: int, dtype: torch.dtype) -> torch.Tensor:
    page = torch.empty(names.layout.page_numel(slice_), dtype=dtype)
    for item in names.of_page(0, slice_):
        names.layout.part(page, slice_, item.part).copy_(item.select(read(item.tensor.name, expert)))
    return page


def _style_of(source: Path, path: str, shapes: Shapes) -> str:
    """``hf`` or ``hf_transposed``, as the shapes of the two matrices fit together."""
    first, down = shapes.get("gate_up_proj", shapes.get("up_proj")), shapes.get("down_proj")
    if first is None or down is None:
        raise ValueError(f"{source}: {path} has only {', '.join(sorted(shapes))} of its experts' tensors")
    wide = 2 if "gate_up_proj" in shapes else 1
    fits = [
        name
        for name, ffn, hidden in (("hf", down[2], down[1]), ("hf_transposed", down[1], down[2]))
        if tuple(first[1:]) == ((wide * ffn, hidden) if name == "hf" else (hidden, wide * ffn))
    ]
    if len(fits) != 1:
        what = "both orientations fit" if fits else "no known orientation fits"
        raise ValueError(
            f"{source}: {path} has gate_up_proj {first} and down_proj {down}: {what}; say which with --style hf, "
            "hf_transposed, hf_gpt_oss or hf_interleaved"
        )
    return fits[0]

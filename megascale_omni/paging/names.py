"""The one map between pages and the named tensors of the experts class that a framework would have used.

Checkpoints, exports, parameter counts and users all go through :class:`NamedTensors`; nothing else knows which rows
of which tensor a page holds.

[Note: naming styles]
    sequential   Megatron-Core SequentialMLP:  local_experts.E.linear_fc1.weight [(M-1) f, h]
                                               local_experts.E.linear_fc2.weight [h, f]
    te_grouped   Megatron-Core TEGroupedMLP:   linear_fc1.weightE [(M-1) f, h], linear_fc2.weightE [h, f]
    grouped      Megatron-Core GroupedMLP:     weight1 viewed [E, h, (M-1) f], weight2 viewed [E, f, h]
    hf           Hugging Face experts:         gate_up_proj [E, 2f, h] (ungated: up_proj [E, f, h]), down_proj [E, h, f]
    hf_transposed, the same transposed:        gate_up_proj [E, h, 2f] (ungated: up_proj [E, h, f]), down_proj [E, f, h]
    hf_gpt_oss   Hugging Face GPT-OSS:         gate_up_proj [E, h, 2f] interleaved, down_proj [E, f, h]
    hf_interleaved, not transposed:            gate_up_proj [E, 2f, h] interleaved, down_proj [E, h, f]
Biases are named alike (``.bias``, ``biasE``, ``_bias``; GroupedMLP has none).
In ``(M-1) f`` all gate rows come first, then all up rows, except where interleaved (gate even, up odd).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from megascale_omni.paging.layout import PageLayout, Part

Range = slice  # the field named `slice` below hides the builtin inside its class
NamingStyle = Literal["sequential", "te_grouped", "grouped", "hf", "hf_transposed", "hf_gpt_oss", "hf_interleaved"]
_INTERLEAVED = ("hf_gpt_oss", "hf_interleaved")
_NEURONS_FIRST = ("hf", "hf_interleaved")


@dataclass(frozen=True)
class NamedTensor:
    """One tensor of the stock experts module: name, stock shape, and the shape under which slices index it."""

    name: str
    shape: tuple[int, ...]
    view_shape: tuple[int, ...]
    is_bias: bool


@dataclass(frozen=True)
class NamedSlice:
    """Where one part of one page lies: ``tensor.view(view_shape)[index]`` is the part (transposed if so)."""

    tensor: NamedTensor
    expert: int
    slice: int
    part: Part
    index: tuple[int | Range, ...]
    transposed: bool

    def select(self, tensor: torch.Tensor) -> torch.Tensor:
        """The region of the named tensor, in the part's own orientation, as a view."""
        region = tensor.view(self.tensor.view_shape)[self.index]
        return region.t() if self.transposed else region


class NamedTensors:
    """All named tensors of one module's ``num_experts`` local experts under a naming style."""

    def __init__(self, *, layout: PageLayout, num_experts: int, style: NamingStyle) -> None:
        if style not in get_args(NamingStyle):
            raise ValueError(f"naming style {style!r} is unknown; known: {', '.join(get_args(NamingStyle))}")
        if style in _INTERLEAVED and not layout.shape.gated:
            raise ValueError(f"naming style {style!r} needs gated experts")
        if style == "grouped" and layout.shape.bias:
            raise ValueError("naming style 'grouped' has no biases; stock GroupedMLP refuses them")
        self.layout = layout
        self.num_experts = num_experts
        self.style = style
        self._slices = tuple(self._build())
        by_page: dict[tuple[int, int], list[NamedSlice]] = {}
        for item in self._slices:
            by_page.setdefault((item.expert, item.slice), []).append(item)
        self._by_page = {name: tuple(items) for name, items in by_page.items()}

    def named_slices(self) -> tuple[NamedSlice, ...]:
        """Every part of every page with its place, ordered by (expert, slice, part)."""
        return self._slices

    def of_expert(self, expert: int) -> Iterator[NamedSlice]:
        """The slices of one expert."""
        return (s for s in self._slices if s.expert == expert)

    def of_page(self, expert: int, slice_: int) -> tuple[NamedSlice, ...]:
        """The parts of one page."""
        return self._by_page[expert, slice_]

    def tensors(self) -> tuple[NamedTensor, ...]:
        """The named tensors in the order of the stock module's ``named_parameters()``."""
        return tuple(dict.fromkeys(s.tensor for s in self._ordered()))

    def _ordered(self) -> list[NamedSlice]:
        # Stock modules register weight before bias and fc1 before fc2; TE's grouped ones weight0, bias0, weight1, ...
        rank = {Part.GATE: 0, Part.UP: 0, Part.GATE_BIAS: 1, Part.UP_BIAS: 1, Part.DOWN: 2, Part.DOWN_BIAS: 3}
        if self.style == "sequential":
            return sorted(self._slices, key=lambda s: (s.expert, rank[s.part]))
        return sorted(self._slices, key=lambda s: (rank[s.part] // 2, s.expert, rank[s.part] % 2))

    def gather(self, pages: Mapping[tuple[int, int], torch.Tensor], out: Mapping[str, torch.Tensor]) -> None:
        """Copies pages ``{(expert, slice): flat page}`` into dense tensors ``{name: tensor}``."""
        for s in self._slices:
            if (s.expert, s.slice) in pages and s.tensor.name in out:
                part = self.layout.part(pages[s.expert, s.slice], s.slice, s.part)
                s.select(out[s.tensor.name]).copy_(part)

    def scatter(self, tensors: Mapping[str, torch.Tensor], pages: Mapping[tuple[int, int], torch.Tensor]) -> None:
        """Copies dense tensors ``{name: tensor}`` into pages; the inverse of :meth:`gather`.

        Raises:
            ValueError: a tensor whose shape is not the named one.
        """
        for s in self._slices:
            if (s.expert, s.slice) not in pages or s.tensor.name not in tensors:
                continue
            tensor = tensors[s.tensor.name]
            if tuple(tensor.shape) != s.tensor.shape:
                raise ValueError(f"{s.tensor.name} has shape {tuple(tensor.shape)}, the model needs {s.tensor.shape}")
            self.layout.part(pages[s.expert, s.slice], s.slice, s.part).copy_(s.select(tensor))

    def _build(self) -> Iterator[NamedSlice]:
        for expert in range(self.num_experts):
            for slice_ in range(self.layout.num_slices):
                for part in self.layout.parts(slice_):
                    yield self._place(expert, slice_, part)

    def _place(self, expert: int, slice_: int, part: Part) -> NamedSlice:
        tensor, axis = self._tensor(expert, part)
        neurons = self._neurons(slice_, part)
        # A part is stored neurons first; the region is transposed where the tensor has its neurons last.
        per_expert = self.style in ("sequential", "te_grouped")
        lead: tuple[int | slice, ...] = () if per_expert else (expert,)
        if part.is_bias:
            return NamedSlice(tensor, expert, slice_, part, (*lead, neurons), False)
        index = (neurons, slice(None)) if axis == 0 else (slice(None), neurons)
        return NamedSlice(tensor, expert, slice_, part, (*lead, *index), axis == 1)

    def _neurons(self, slice_: int, part: Part) -> slice:
        """The part's neurons along the tensor's neuron dimension."""
        if part is Part.DOWN_BIAS:
            return slice(0, self.layout.shape.hidden)
        own, f = self.layout.neurons(slice_), self.layout.shape.ffn
        if part in (Part.DOWN,) or not self.layout.shape.gated:
            return own
        is_up = part in (Part.UP, Part.UP_BIAS)
        if self.style in _INTERLEAVED:
            return slice(2 * own.start + is_up, 2 * own.stop + is_up - 1, 2)
        return slice(own.start + f * is_up, own.stop + f * is_up)

    def _tensor(self, expert: int, part: Part) -> tuple[NamedTensor, int]:
        """The named tensor of a part, and the axis of its neurons (of the two matrix axes)."""
        h, f, wide = self.layout.shape.hidden, self.layout.shape.ffn, (self.layout.shape.num_matrices - 1)
        down, count = part in (Part.DOWN, Part.DOWN_BIAS), self.num_experts
        if self.style in ("sequential", "te_grouped"):
            kind = "bias" if part.is_bias else "weight"
            fc = "linear_fc2" if down else "linear_fc1"
            sequential = self.style == "sequential"
            name = f"local_experts.{expert}.{fc}.{kind}" if sequential else f"{fc}.{kind}{expert}"
            shape: tuple[int, ...] = (h, f) if down else (wide * f, h)
            shape = ((h,) if down else (wide * f,)) if part.is_bias else shape
            return NamedTensor(name, shape, shape, part.is_bias), 1 if down else 0
        if self.style == "grouped":
            if down:
                return NamedTensor("weight2", (count * f, h), (count, f, h), False), 0
            return NamedTensor("weight1", (h, count * wide * f), (count, h, wide * f), False), 1
        fc1 = "gate_up_proj" if self.layout.shape.gated else "up_proj"
        name = ("down_proj" if down else fc1) + ("_bias" if part.is_bias else "")
        if part.is_bias:
            shape = (count, h if down else wide * f)
            return NamedTensor(name, shape, shape, True), 0
        neurons_first = (self.style in _NEURONS_FIRST) != down
        rows = (f if down else wide * f, h)
        shape = (count, *(rows if neurons_first else rows[::-1]))
        return NamedTensor(name, shape, shape, False), 0 if neurons_first else 1

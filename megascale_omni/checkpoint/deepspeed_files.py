"""DeepSpeed's own checkpoints: what ZeRO 1, 2 and 3 divided among ranks, read back tensor by tensor.

    TAG/mp_rank_00_model_states.pt                          ZeRO 1, 2: weights, buffers, position, names and shapes
    TAG/zero_pp_rank_R_mp_rank_00_model_states.pt           ZeRO 3: the same of each rank, without weights
    TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt    a rank's part of masters and moments, flat

[Note: ZeRO's flat partitions]
Masters and moments of a group of parameters are one flat tensor. ZeRO 1 and 2 put whole parameters behind each other,
each followed by a padding, and cut the result into as many equal parts as there are ranks. ZeRO 3 cuts every parameter
into equal parts, the last one filled up, and puts a rank's parts behind each other. Element ``i`` of a parameter is in
both at rank ``(lead + i) // period``, element ``base + (lead + i) % period`` of what that rank has of the group.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megascale_omni.checkpoint.plain_load import load_plain

MASTER = "param"
MOMENTS = ("exp_avg", "exp_avg_sq")
LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
_FP32 = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_REFUSED = {
    "layer_*_expert_*_model_states.pt": "experts of DeepSpeed's own MoE layers, which belong to expert-parallel ranks",
    "offloaded_tensors": "an optimizer on NVMe, whose state is in the swap files of one machine",
}


@dataclass(frozen=True)
class FlatPlace:
    """Where a parameter lies in the flat tensors of its group, see [Note: ZeRO's flat partitions]."""

    group: int
    shape: tuple[int, ...]
    period: int
    lead: int = 0
    base: int = 0

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, slice]]:
        """Elements ``start .. stop`` of the flattened parameter: rank, and where they are in what it has."""
        position, last = self.lead + start, self.lead + stop
        while position < last:
            rank, inside = divmod(position, self.period)
            count = min(self.period - inside, last - position)
            yield rank, slice(self.base + inside, self.base + inside + count)
            position += count


@dataclass(frozen=True)
class _Rank:
    """A rank's part: flat tensors by group, of masters and moments."""

    flat: Mapping[str, Sequence[torch.Tensor | None]]


class DeepSpeedFiles:
    """A checkpoint of DeepSpeed's, from the folder of its tag.

    Attributes:
        model: what is in the (first) file of the model. stage: of ZeRO. steps: of the optimizer. groups: settings of
        its parameter groups. group_of: parameter -> number of its group. shapes: of all trained parameters.

    Raises:
        ValueError: files that are missing, damaged, hold classes that are not let through, or are of a kind that is not
        read; by name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for pattern, what in _REFUSED.items():
            if any(folder.glob(pattern)):
                raise ValueError(f"{folder} cannot be converted: it has {pattern}, of {what}")
        self._models = self._load(_MODEL)
        states = [self._field(one, "optimizer_state_dict", number) for number, one in enumerate(self._load(_OPTIMIZER))]
        self.model = self._models[0]
        if not states:
            raise ValueError(
                f"{folder} has no files of ZeRO 1, 2 or 3 (*zero_pp_rank_*_optim_states.pt): without ZeRO DeepSpeed "
                "does not say which parameter a moment is of"
            )
        self.stage = _number(states[0].get("zero_stage"))
        if self.stage not in (1, 2, 3):
            raise ValueError(f"{folder}: ZeRO stage {self.stage!r} is unknown")
        counts = states[0].get("partition_count", len(states))
        if any(count != len(states) for count in (counts if isinstance(counts, list) else [counts])):
            raise ValueError(f"{folder} was saved by {counts} ranks and has the optimizer files of {len(states)}")
        if self.stage == 3 and len(self._models) != len(states):
            raise ValueError(f"{folder} has model files of {len(self._models)} ranks of {len(states)}")
        inner = self._inner(states[0])
        self.groups: list[dict[str, Any]] = list(inner["param_groups"])
        self.steps = self._steps(inner)
        self._ranks = [self._rank(state) for state in states]
        self._places = dict(self._all_places(states[0]))
        self.shapes = {name: place.shape for name, place in self._places.items()}
        self.group_of = self._groups_of_parameters()

    def _load(self, pattern: re.Pattern[str]) -> list[dict[str, Any]]:
        found = {}
        for path in self.folder.iterdir():
            match = pattern.fullmatch(path.name)
            if match is None:
                continue
            if int(match[2]):
                raise ValueError(
                    f"{path} is of tensor-parallel rank {int(match[2])}: tensor parallelism is not converted"
                )
            found[int(match[1] or 0)] = path
        if sorted(found) != list(range(len(found))):
            raise ValueError(f"{self.folder} has files of ranks {sorted(found)} only")
        return [load_plain(path, str(path), framework="deepspeed") for _, path in sorted(found.items())]

    def _field(self, content: Mapping[str, Any], name: str, rank: int) -> dict[str, Any]:
        if not isinstance(content.get(name), dict):
            raise ValueError(f"{self.folder}: the optimizer file of rank {rank} has no {name}")
        found: dict[str, Any] = content[name]
        return found

    def _inner(self, state: Mapping[str, Any]) -> dict[str, Any]:
        inner = state.get("optimizer_state_dict" if self.stage == 3 else "base_optimizer_state")
        if not isinstance(inner, dict):
            raise ValueError(f"{self.folder} was saved with elastic_checkpoint, which DeepSpeed has given up")
        return inner

    def _steps(self, inner: Mapping[str, Any]) -> int:
        counts = [state["step"] for state in inner["state"].values() if "step" in state]
        counts += [group["step"] for group in self.groups if "step" in group]
        return max((int(count) for count in counts), default=0)

    def _rank(self, state: Mapping[str, Any]) -> _Rank:
        masters = state[_FP32[self.stage]]
        of_group = self._inner(state)["state"]
        for number, found in of_group.items():
            if not set(MOMENTS) <= found.keys():
                raise ValueError(
                    f"{self.folder}: the optimizer keeps {', '.join(map(str, found))}, which is not Adam's"
                )
            del number
        moments = {name: [of_group.get(i, {}).get(name) for i in range(len(masters))] for name in MOMENTS}
        return _Rank({MASTER: masters, **moments})

    def _all_places(self, state: Mapping[str, Any]) -> Iterator[tuple[str, FlatPlace]]:
        ranks, paddings = len(self._ranks), state.get("param_alignment_paddings")
        for group, shapes in enumerate(self.model["param_shapes"]):
            offset = 0
            longest = max(len(part) for rank in self._ranks if (part := rank.flat[MASTER][group]) is not None)
            moment = self._ranks[0].flat[MOMENTS[0]][group]
            period = longest if moment is None else len(moment)
            for number, (name, size) in enumerate(shapes.items()):
                shape, numel = tuple(size), math.prod(size)
                if self.stage == 3:
                    yield name, FlatPlace(group, shape, -(-numel // ranks), base=offset)
                    offset += -(-numel // ranks)
                else:
                    yield name, FlatPlace(group, shape, period, lead=offset)
                    offset += numel + (0 if paddings is None else paddings[group][number])

    def _groups_of_parameters(self) -> dict[str, int]:
        """Under ZeRO 3 flat groups are parts of parameter groups, which count them."""
        of_flat = {flat: number for number, group in enumerate(self.groups) for flat in group["params"]}
        return {name: of_flat.get(place.group, place.group) for name, place in self._places.items()}

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        """Ranks that the optimizer's state is divided among."""
        return len(self._ranks)

    @property
    def has_moments(self) -> bool:
        """Whether a step was made."""
        return any(tensor is not None for tensor in self._ranks[0].flat[MOMENTS[0]])

    def dtype(self, name: str) -> torch.dtype:
        """What a parameter is computed with."""
        found = self.model["module"].get(name)
        return found.dtype if isinstance(found, torch.Tensor) else torch.float32

    def read(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements ``start .. stop`` of a trained parameter's master or moment, flat, fp32.

        Raises:
            ValueError: parts that are too short.
        """
        place = self._places[name]
        stop = math.prod(place.shape) if stop is None else stop
        parts = []
        for rank, where in place.parts(start, stop):
            flat = self._ranks[rank].flat[kind][place.group]
            if flat is None or len(flat) < where.stop:
                raise ValueError(f"{self.folder}: rank {rank} does not have all of {kind} of {name}")
            parts.append(flat[where])
        return torch.cat(parts) if parts else torch.empty(0)

    def frozen(self) -> dict[str, tuple[int, ...]]:
        """Parameters that the optimizer does not have, with their shapes; of tied ones the one that is stored."""
        if self.stage == 3:
            return {name: tuple(shape) for name, shape in (self.model.get("frozen_param_shapes") or {}).items()}
        others = {*self.shapes, *self.model["buffer_names"], *(self.model.get("shared_params") or {})}
        return {name: tuple(tensor.shape) for name, tensor in self.model["module"].items() if name not in others}

    def read_frozen(self, name: str) -> torch.Tensor:
        """A frozen parameter; under ZeRO 3 put together from the ranks' parts."""
        if self.stage != 3:
            found: torch.Tensor = self.model["module"][name]
            return found
        flat = torch.cat([model["frozen_param_fragments"][name].reshape(-1) for model in self._models])
        shape = self.frozen()[name]
        return flat[: math.prod(shape)].view(shape)


def tag_folder(source: Path) -> Path:
    """The folder of a tag: ``source`` itself, or the one that its file ``latest`` names. ValueError: it is gone."""
    latest = next((source / name for name in (LATEST, LATEST_UNIVERSAL) if (source / name).is_file()), None)
    if latest is None:
        return source
    folder = source / latest.read_text().strip()
    if not folder.is_dir():
        raise ValueError(f"{latest} names {folder.name}, and there is no {folder}")
    return folder


def _number(value: object) -> int:
    """An enumeration's value, as DeepSpeed's classes are not imported; -1 where it is no number."""
    args = getattr(value, "args", None)
    found = args[0] if isinstance(args, tuple) and args else value
    return found if isinstance(found, int) else -1

"""DeepSpeed's universal checkpoints, read tensor by tensor; see deepspeed_write for what is where."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from megascale_omni.checkpoint.deepspeed_files import MASTER, MOMENTS, DeepSpeedFiles
from megascale_omni.checkpoint.plain_load import load_plain

ZERO = "zero"
_FILES = {MASTER: "fp32.pt", **{moment: f"{moment}.pt" for moment in MOMENTS}}


class Files(Protocol):
    """What is read of a checkpoint of DeepSpeed's, see :class:`DeepSpeedFiles`."""

    folder: Path
    model: dict[str, Any]
    stage: int
    steps: int
    groups: list[dict[str, Any]]
    group_of: dict[str, int]
    shapes: dict[str, tuple[int, ...]]

    @property
    def num_ranks(self) -> int: ...

    @property
    def has_moments(self) -> bool: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> torch.Tensor: ...

    def frozen(self) -> dict[str, tuple[int, ...]]: ...

    def read_frozen(self, name: str) -> torch.Tensor: ...


def open_files(folder: Path) -> Files:
    """The reader for the files in a tag's folder."""
    return UniversalFiles(folder) if (folder / ZERO).is_dir() else DeepSpeedFiles(folder)


class UniversalFiles:
    """A universal checkpoint, from the folder of its tag; a :class:`Files` of no stage and one rank.

    Raises:
        ValueError: files that are missing, damaged or hold classes that are not let through; experts of ranks; by name.
    """

    num_ranks = 1
    stage = 0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        models = sorted(folder.glob("*mp_rank_00_model_states.pt"))
        if not models or any("mp_rank_00" not in path.name for path in folder.glob("*model_states.pt")):
            raise ValueError(f"{folder} has files of tensor-parallel ranks: tensor parallelism is not converted")
        self.model: dict[str, Any] = load_plain(models[0], str(models[0]), framework="deepspeed")
        of_groups = self.model.get("param_shapes") or ()
        self._shapes = {name: tuple(size) for shapes in of_groups for name, size in shapes.items()}
        path = folder / ZERO / "optimizer_state.pt"
        state = load_plain(path, str(path), framework="deepspeed")
        if not isinstance(state, dict) or "param_groups" not in state:
            raise ValueError(f"{path} does not hold what DeepSpeed writes there")
        inner = state.get("optimizer_state_dict", {"state": {}})
        self.groups: list[dict[str, Any]] = list(state["param_groups"])
        names = sorted(path.name for path in (folder / ZERO).iterdir() if path.is_dir())
        self._tensors = {(name, kind): self._tensor(name, file) for name in names for kind, file in _FILES.items()}
        trained = [name for name in names if self._tensors[name, MOMENTS[0]] is not None]
        self.shapes = {name: tuple(self._whole(name, MASTER).shape) for name in trained}
        self.group_of = dict.fromkeys(trained, 0)  # which it is, nothing says; settings are set anew at every step
        others = {*self.shapes, *(self.model.get("buffer_names") or ()), *(self.model.get("shared_params") or ())}
        self._others = [name for name in names if name not in others]
        counts = [inner["state"][0]["step"]] if inner["state"] else []
        for name in trained[:1]:
            path = folder / ZERO / name / "step.pt"
            counts += [load_plain(path, str(path), framework="deepspeed")] if path.is_file() else []
        self.steps = max((int(count) for count in counts), default=0)

    def _tensor(self, name: str, file: str) -> torch.Tensor | None:
        path = self.folder / ZERO / name / file
        if not path.is_file():
            return None
        content = load_plain(path, str(path), framework="deepspeed")
        if isinstance(content, torch.Tensor):  # what was ZeRO 3 is flat
            return content.view(self._shapes[name]) if name in self._shapes else content
        if not isinstance(content, dict) or not isinstance(content.get("param"), torch.Tensor):
            raise ValueError(f"{path} does not hold what DeepSpeed writes there")
        if content.get("is_expert_param"):
            raise ValueError(f"{path} is of experts that DeepSpeed divides among ranks: they are not converted")
        found: torch.Tensor = content["param"]
        return found

    def _whole(self, name: str, kind: str) -> torch.Tensor:
        found = self._tensors[name, kind]
        if found is None:
            raise ValueError(f"{self.folder / ZERO / name / _FILES[kind]} is missing")
        return found

    @property
    def has_moments(self) -> bool:
        """See :class:`DeepSpeedFiles`."""
        return bool(self.shapes)

    def dtype(self, name: str) -> torch.dtype:
        """See :class:`DeepSpeedFiles`."""
        found = (self.model.get("module") or {}).get(name)
        return found.dtype if isinstance(found, torch.Tensor) else torch.float32

    def read(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """See :class:`DeepSpeedFiles`."""
        return self._whole(name, kind).reshape(-1)[start:stop].float()

    def frozen(self) -> dict[str, tuple[int, ...]]:
        """See :class:`DeepSpeedFiles`."""
        return {name: tuple(self._whole(name, MASTER).shape) for name in self._others}

    def read_frozen(self, name: str) -> torch.Tensor:
        """See :class:`DeepSpeedFiles`."""
        return self._whole(name, MASTER).to(self.dtype(name))

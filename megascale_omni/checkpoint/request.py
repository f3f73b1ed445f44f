"""What is saved: a rank's state, and what a save is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megascale_omni.checkpoint.dense import TensorPiece
from megascale_omni.checkpoint.pages import ExpertsPiece
from megascale_omni.optimizer.paged_adam import PagedAdam

DENSE_MPU, EXPERTS_MPU = "dense", "experts"
"""Parts of a checkpoint, each with a folder of its own."""


class SaveError(RuntimeError):
    """A checkpoint could not be written; what was there before is still there."""


@dataclass(frozen=True)
class RankState:
    """What one rank has of a run's state.

    Attributes:
        tensors: dense tensors, those of the optimizer among them where its state is wanted. experts: modules of paged
            experts. adam: their optimizer, None where they have none.
    """

    tensors: Sequence[TensorPiece]
    experts: Sequence[ExpertsPiece] = ()
    adam: PagedAdam | None = None


@dataclass(frozen=True)
class SaveRequest:
    """What is to be saved, beside the state.

    Attributes:
        tag, step: name and step of the checkpoint. values: plain values of the run (rank 0's count). layout: parallel
        sizes. configuration: of the run, plain values. versions: of its frameworks. full: store unchanged pages too.
        include_optimizer: the experts' optimizer state; without it their weights are caught up first. coordinates:
        this rank's place, for ``resource_binding.json``.
    """

    tag: str
    step: int
    values: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, int] = field(default_factory=dict)
    configuration: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    full: bool = True
    include_optimizer: bool = True
    coordinates: Mapping[str, int] = field(default_factory=dict)


def mpu_folder(mpu: str) -> str:
    """Name of a part's folder in a checkpoint."""
    return f"mpu_{1 + (DENSE_MPU, EXPERTS_MPU).index(mpu):03d}_{mpu}_state"

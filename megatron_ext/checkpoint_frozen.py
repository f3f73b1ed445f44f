"""Optimizer state of dense parameters that a run does not step: it waits in the run's checkpoints.

Stock stacks the layers of a model under one key, so that a key may be frozen in part: what is looked at are boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megascale_omni.checkpoint.boxes import Box
from megascale_omni.checkpoint.dense import DenseIndex, TensorPiece
from megatron_ext.checkpoint_state import MODEL, OPTIMIZER

Part = tuple[str, Box]
"""Key of stock's, and where a parameter lies in its tensor."""


@dataclass(frozen=True)
class FrozenState:
    """Stored state of a parameter, or of what one rank has of it: name, shape of the whole tensor, where in it."""

    name: str
    global_shape: tuple[int, ...]
    box: Box

    def read(self, dense: DenseIndex) -> TensorPiece:
        """As a piece that this rank saves."""
        return TensorPiece(self.name, self.global_shape, self.box, dense.read(self.name, self.box))


def parts_here(pieces: Sequence[TensorPiece]) -> tuple[set[Part], set[Part]]:
    """Parts of the model on this rank, and those of them that it steps, or some elements of."""
    model = {(piece.name.removeprefix(MODEL), piece.box) for piece in pieces if piece.name.startswith(MODEL)}
    stepped: dict[str, list[Box]] = {}
    for piece in pieces:
        if piece.name.startswith(OPTIMIZER):
            _, kind, key = piece.name.split(".", 2)
            if kind != "step":  # it has another shape
                stepped.setdefault(key, []).append(piece.box)
    return model, {(key, box) for key, box in model if any(box.overlap(b) for b in stepped.get(key, ()))}


def frozen_state(dense: DenseIndex, of_ranks: Iterable[tuple[set[Part], set[Part]]]) -> list[FrozenState]:
    """What is stored of parameters that the whole model has and that no rank steps, the same on all ranks."""
    model, stepped = (set().union(*parts) for parts in zip(*of_ranks, strict=True))
    by_key: dict[str, list[str]] = {}
    for name in dense.tensors:
        if name.startswith(OPTIMIZER):
            by_key.setdefault(name.split(".", 2)[2], []).append(name)
    found = set()  # parts of a parameter on several ranks have one step
    for key, box in model - stepped:
        for name in by_key.get(key, ()):
            shape = dense.tensors[name][0].global_shape
            at = box if len(shape) == len(box.shape) and not name.startswith(f"{OPTIMIZER}step.") else _step(box, shape)
            if dense.holds(name, at):
                found.add(FrozenState(name, shape, at))
    return sorted(found, key=lambda part: (part.name, part.box.offset))


def _step(box: Box, shape: tuple[int, ...]) -> Box:
    """Where the step of a parameter lies: one number a layer, or one alone."""
    lead = len(shape)
    return Box(box.offset[:lead] if shape != (1,) else (0,), (1,) * lead)

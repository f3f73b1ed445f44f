"""Dense tensors: parameters, optimizer state and whatever else is whole tensors, stored as boxes under global names."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from megascale_omni.checkpoint.boxes import Box, boxes_of_range, copy_overlap, whole
from megascale_omni.checkpoint.datafile import (
    CHUNK_BYTES,
    DTYPES,
    NAMES,
    Entry,
    Place,
    header_of,
    places,
    read_into,
    read_tensor,
)
from megascale_omni.checkpoint.digests import Data
from megascale_omni.checkpoint.snapshot import Register

DENSE_KEY = "dense"
"""Key of everything that changes in the dense optimizer's step."""


@dataclass(frozen=True)
class TensorPiece:
    """This rank's part of a named tensor.

    Attributes:
        name: the same on every rank and in every layout. global_shape: of the whole tensor. box: where the part lies.
        tensor: the part, with the box's shape; saved from, and loaded into.
        writes: whether this rank saves it; of replicas one does. optional: a load leaves it alone if it is not stored.
        live: it changes in optimizer steps only, so that an asynchronous save may read it until then; else it is
            copied at once.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor
    writes: bool = True
    optional: bool = False
    live: bool = True

    def __post_init__(self) -> None:
        if tuple(self.tensor.shape) != self.box.shape or not self.box.inside(self.global_shape):
            raise RuntimeError(
                f"{self.name}: a tensor of shape {tuple(self.tensor.shape)} as box {self.box} of {self.global_shape}"
            )


def whole_piece(name: str, tensor: torch.Tensor, *, writes: bool = True, optional: bool = False) -> TensorPiece:
    """A tensor that this rank has as a whole, copied when it is saved."""
    shape = tuple(tensor.shape)
    return TensorPiece(name, shape, whole(shape), tensor, writes=writes, optional=optional, live=False)


def flat_pieces(
    name: str,
    shape: tuple[int, ...],
    tensor: torch.Tensor,
    *,
    start: int,
    within: Box,
    global_shape: tuple[int, ...],
    writes: bool = True,
) -> list[TensorPiece]:
    """Pieces of a flat ``tensor`` that is the elements from ``start`` on of a part of ``shape`` (a flattened shard).

    ``within`` is where that part lies in the whole tensor; leading dimensions of size 1 may be missing in ``shape``.
    """
    pieces, position = [], 0
    extra = len(within.shape) - len(shape)
    for box in boxes_of_range(shape, start, start + tensor.numel()):
        offset = tuple(a + b for a, b in zip(within.offset, (*(0,) * extra, *box.offset), strict=True))
        full = Box(offset, (*(1,) * extra, *box.shape))
        view = tensor.view(-1)[position : position + box.numel].view(full.shape)
        pieces.append(TensorPiece(name, global_shape, full, view, writes=writes))
        position += box.numel
    return pieces


class TensorsPlan:
    """The tensors that a rank writes to its file ``path``, with their values of now. On any thread, at any time."""

    def __init__(self, pieces: Iterable[TensorPiece], *, path: str, register: Register) -> None:
        self.path = path
        self._chosen = [piece for piece in pieces if piece.writes]
        self._chunks = [_chunks(piece, register) for piece in self._chosen]

    @cached_property
    def entries(self) -> list[Entry]:
        """The entries of the file."""
        counts: Counter[str] = Counter()
        entries = []
        for piece, chunks in zip(self._chosen, self._chunks, strict=True):
            counts[piece.name] += 1
            number = counts[piece.name]
            name = piece.name if number == 1 else f"{piece.name}#{number}"
            entries.append(Entry(name, piece.tensor.dtype, piece.box.shape, chunks))
        return entries

    @cached_property
    def header(self) -> bytes:
        """The file's header."""
        return header_of(self.entries)

    def index(self) -> bytes:
        """What says where the tensors are."""
        return _index(self._chosen, places(self.path, self.entries, header_bytes=len(self.header)))


def _index(pieces: Sequence[TensorPiece], where: Sequence[Place]) -> bytes:
    index = [
        {
            "name": piece.name,
            "global_shape": piece.global_shape,
            "offset": piece.box.offset,
            "shape": piece.box.shape,
            "place": place.as_list(),
        }
        for piece, place in zip(pieces, where, strict=True)
    ]
    return json.dumps(index).encode()


def _chunks(piece: TensorPiece, register: Register) -> list[Callable[[], Data]]:
    tensor = piece.tensor
    if not piece.live:
        return [partial(read_tensor, tensor.detach().clone())]
    nbytes = tensor.numel() * tensor.dtype.itemsize
    if nbytes <= CHUNK_BYTES or not tensor.is_contiguous():
        return [register(DENSE_KEY, partial(read_tensor, tensor), nbytes)]
    flat, step = tensor.detach().view(-1), max(1, CHUNK_BYTES // tensor.dtype.itemsize)
    result = []
    for start in range(0, flat.numel(), step):
        part = flat[start : start + step]
        result.append(register(DENSE_KEY, partial(read_tensor, part), part.numel() * part.dtype.itemsize))
    return result


@dataclass(frozen=True)
class StoredBox:
    """One stored part of a tensor."""

    global_shape: tuple[int, ...]
    box: Box
    place: Place


class DenseIndex:
    """What all ranks stored of dense tensors, by name."""

    def __init__(self, folder: Path, indices: Iterable[bytes]) -> None:
        self.folder = folder
        self.tensors: dict[str, list[StoredBox]] = {}
        for data in indices:
            for item in json.loads(data):
                self.tensors.setdefault(item["name"], []).append(_stored(item))

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A whole tensor, or what lies in a box of it, with the box's shape.

        Raises:
            KeyError: it is not stored. ValueError: not all of it is, as where only some layers have been stepped.
        """
        parts = self.tensors[name]
        box = whole(parts[0].global_shape) if box is None else box
        if not self.holds(name, box):
            raise ValueError(f"checkpoint {self.folder} does not have all of {name} that lies in {box}")
        tensor = torch.empty(box.shape, dtype=NAMES[parts[0].place.dtype])
        self._fill(name, box, tensor)
        return tensor

    def holds(self, name: str, box: Box, *, all_of_it: bool = True) -> bool:
        """Whether a box of a tensor is stored, or any part of it."""
        parts = self.tensors.get(name, [])
        if not parts or len(parts[0].global_shape) != len(box.shape):
            return False
        held = _held(parts, box)
        return held == box.numel if all_of_it else held > 0

    def problems(self, pieces: Sequence[TensorPiece]) -> list[str]:
        """Why pieces could not be loaded: missing tensors, other shapes or dtypes; empty where all of them can."""
        found = []
        for piece in pieces:
            parts = self.tensors.get(piece.name)
            if parts is None:
                if not piece.optional:
                    found.append(f"has no tensor {piece.name}")
            elif parts[0].global_shape != piece.global_shape:
                found.append(f"has {piece.name} of shape {parts[0].global_shape}, the model needs {piece.global_shape}")
            elif parts[0].place.dtype != DTYPES[piece.tensor.dtype]:
                found.append(f"has {piece.name} as {parts[0].place.dtype}, the run needs {DTYPES[piece.tensor.dtype]}")
            elif _held(parts, piece.box) != piece.box.numel:
                found.append(f"does not have all of {piece.name} that lies in {piece.box}")
        return found

    @torch.no_grad()
    def load(self, pieces: Sequence[TensorPiece]) -> None:
        """Fills the pieces' tensors in place.

        Raises:
            ValueError: what :meth:`problems` says; nothing is loaded then.
        """
        problems = self.problems(pieces)
        if problems:
            raise ValueError(f"checkpoint {self.folder} {'; '.join(problems[:5])}")
        for piece in pieces:
            if piece.name in self.tensors:
                self._fill(piece.name, piece.box, piece.tensor)

    def _fill(self, name: str, box: Box, target: torch.Tensor) -> None:
        for stored in self.tensors[name]:
            if stored.box.overlap(box) is None:
                continue
            if stored.box == box and target.is_contiguous() and target.device.type == "cpu":
                read_into(self.folder, stored.place, target.detach())
                continue
            part = torch.empty(stored.box.shape, dtype=NAMES[stored.place.dtype])
            read_into(self.folder, stored.place, part)
            copy_overlap(source=part, source_box=stored.box, target=target, target_box=box)


def _held(parts: Iterable[StoredBox], box: Box) -> int:
    return sum(common.numel for part in parts if (common := part.box.overlap(box)) is not None)


def _stored(item: dict[str, Any]) -> StoredBox:
    shape = tuple(item["shape"])
    place = Place(*item["place"])
    if place.end - place.begin != math.prod(shape) * NAMES[place.dtype].itemsize:
        raise ValueError(f"the index says {item['name']} has shape {shape} and bytes {place.begin}..{place.end}")
    return StoredBox(tuple(item["global_shape"]), Box(tuple(item["offset"]), shape), place)

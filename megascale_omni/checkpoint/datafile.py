"""Data files: safetensors files, written in one pass from tensors that stay where they are.

    8 bytes little-endian length | JSON {name: {dtype, shape, data_offsets}} | the tensors, one behind the other

A file's header is known before its first byte is, so that a file is written chunk by chunk: no more than a chunk is
held beside the tensors themselves, and other programs read the file with the safetensors package. In a large file the
header is filled up with spaces to a whole block, so that pages lie at blocks and need not be copied to be written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from megascale_omni.checkpoint import digests
from megascale_omni.checkpoint.digests import Data
from megascale_omni.checkpoint.filesystem import BLOCK_BYTES, FileSystem
from megascale_omni.checkpoint.manifest import FileRecord

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in safetensors' headers."""
NAMES = {name: dtype for dtype, name in DTYPES.items()}
CHUNK_BYTES = 4 << 20
_LARGE_BYTES = 64 * BLOCK_BYTES
_BATCH_BYTES = 12 << 20
_BATCH_CHUNKS = 256


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. ``chunks`` give its bytes, in order, when they are asked for."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Sequence[Callable[[], Data]]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes are: checkpoint (its tag, empty for the same one), file, bytes ``begin .. end``, dtype."""

    tag: str
    path: str
    begin: int
    end: int
    dtype: str

    def as_list(self) -> list[object]:
        """For JSON."""
        return [self.tag, self.path, self.begin, self.end, self.dtype]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    flat = tensor if tensor.dim() == 1 else tensor.reshape(-1)
    return (flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)).data


def read_tensor(tensor: torch.Tensor) -> memoryview:
    """The bytes of any tensor; copied where it is on a device or not contiguous."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return bytes_of(tensor)
    return bytes_of(tensor.detach().cpu().contiguous())


def places(path: str, entries: Sequence[Entry], *, header_bytes: int | None = None) -> list[Place]:
    """Where each entry will be in the file that :func:`write` makes of them; ``header_bytes`` where they are known."""
    begin = len(header_of(entries)) if header_bytes is None else header_bytes
    found = []
    for entry in entries:
        found.append(Place("", path, begin, begin + entry.nbytes, DTYPES[entry.dtype]))
        begin += entry.nbytes
    return found


def write(
    files: FileSystem,
    folder: Path,
    path: str,
    entries: Sequence[Entry],
    *,
    digest_name: str,
    release: Callable[[], None] = lambda: None,
    header: bytes | None = None,
) -> FileRecord:
    """Makes the file ``path`` of ``folder``, and returns when it is on disk (its folder is not synced).

    ``release`` is called whenever all chunks that were asked for so far have been written. ``header``:
    :func:`header_of` the entries, where it is known.

    Raises:
        OSError: of the file system. RuntimeError: chunks of another size than announced.
    """
    header = header_of(entries) if header is None else header
    digest, size = digests.new(digest_name), 0
    file = files.create(folder / path)
    try:
        for batch in _batches(_all_bytes(header, entries)):
            file.write(*batch)
            for data in batch:
                digest.update(data)
                size += len(data)
            release()
        file.sync()
    finally:
        file.close()
    expected = len(header) + sum(entry.nbytes for entry in entries)
    if size != expected:
        raise RuntimeError(f"{path}: {size} bytes were written where {expected} were announced")
    return FileRecord(path, size, f"{digest_name}:{digest.hexdigest()}")


def _all_bytes(header: bytes, entries: Sequence[Entry]) -> Iterator[Data]:
    yield header
    for entry in entries:
        for chunk in entry.chunks:
            yield chunk()


def _batches(chunks: Iterable[Data]) -> Iterator[list[Data]]:
    """Chunks for one call of the system each: a thread that sleeps through few long writes disturbs others least."""
    batch: list[Data] = []
    nbytes = 0
    for data in chunks:
        batch.append(data)
        nbytes += len(data)
        if nbytes >= _BATCH_BYTES or len(batch) == _BATCH_CHUNKS:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def header_of(entries: Sequence[Entry]) -> bytes:
    """What a file of these entries begins with."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for entry in entries:
        offsets = [begin, begin + entry.nbytes]
        header[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        begin += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    alignment = BLOCK_BYTES if begin >= _LARGE_BYTES else 8
    text += b" " * (-(len(text) + 8) % alignment)
    return len(text).to_bytes(8, "little") + text


def read_into(folder: Path, place: Place, target: torch.Tensor) -> None:
    """Fills a contiguous CPU tensor with the bytes of a place as seen from the checkpoint in ``folder``.

    Raises:
        RuntimeError: sizes or dtypes differ, or the file ends early; names the file.
    """
    path = (folder.parent / place.tag if place.tag else folder) / place.path
    if NAMES[place.dtype] is not target.dtype or place.end - place.begin != target.numel() * target.dtype.itemsize:
        raise RuntimeError(
            f"{path}: {place.end - place.begin} bytes of {place.dtype} do not fit a {target.dtype} tensor of "
            f"{target.numel()} elements"
        )
    rest = bytes_of(target)
    with path.open("rb", buffering=0) as file:
        file.seek(place.begin)
        while rest:
            count = file.readinto(rest)
            if not count:
                raise RuntimeError(f"{path} ends before byte {place.end}")
            rest = rest[count:]

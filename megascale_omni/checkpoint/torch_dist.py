"""Files of torch's distributed checkpoints (`torch_dist`), read box by box and written tensor by tensor.

    FOLDER/.metadata       which tensors there are, and in which bytes of which file every part of them is
    FOLDER/*.distcp        parts, each as torch.save wrote it

Nothing here knows what the tensors mean. The metadata file is a pickle: only the classes that such a file is made of
are let out of it.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from megascale_omni.checkpoint.assemble import Source
from megascale_omni.checkpoint.boxes import Box, copy_overlap, whole
from megascale_omni.checkpoint.plain_load import load_plain

METADATA = ".metadata"
_MODULES = tuple(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "filesystem", "planner"))
_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("pathlib", "PosixPath"),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Lets classes of distributed checkpoints' metadata out of a pickle, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - pickle's signature
        kinds = (torch.dtype, torch.layout, torch.memory_format)
        known = module in _MODULES or (module, name) in _NAMES
        if known or (module == "torch" and isinstance(getattr(torch, name, None), kinds)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint's metadata")


class TorchDist:
    """A distributed checkpoint that is read in parts.

    Raises:
        ValueError: metadata that cannot be read, or files that are missing or too short; names the file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / METADATA
        try:
            metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
            entries = dict(metadata.state_dict_metadata)
            self._storage = dict(metadata.storage_data)
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError, IndexError, KeyError) as error:
            raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        self.tensors: dict[str, TensorStorageMetadata] = {
            name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
        }
        self.objects = sorted(entries.keys() - self.tensors.keys())
        self._check_files()

    def _check_files(self) -> None:
        needed: dict[str, int] = {}
        for info in self._storage.values():
            needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
        for name, nbytes in sorted(needed.items()):
            path = self.folder / name
            size = path.stat().st_size if path.is_file() else -1
            if size < nbytes:
                raise ValueError(f"{path} {'is missing' if size < 0 else f'has {size} bytes of {nbytes}'}")

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return tuple(self.tensors[name].size)

    def dtype(self, name: str) -> torch.dtype:
        """The tensor's dtype."""
        return self.tensors[name].properties.dtype

    def source(self, name: str) -> Source:
        """A whole tensor, to be read later."""
        shape = self.shape(name)
        return Source(self.dtype(name), shape, lambda: self.read(name, whole(shape)))

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A part of a tensor, with the box's shape. ValueError where the files do not have all of it."""
        target = torch.empty(box.shape, dtype=self.dtype(name))
        found = 0
        for index, chunk in enumerate(self.tensors[name].chunks):
            stored = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            if stored.overlap(box) is None:
                continue
            part = self._load(MetadataIndex(name, chunk.offsets, index))
            source = part.reshape(stored.shape)
            found += copy_overlap(source=source, source_box=stored, target=target, target_box=box)
        if found != math.prod(box.shape):
            raise ValueError(f"{self.folder} does not have all of {name} that lies in {box}")
        return target

    def object(self, name: str) -> Any:  # noqa: ANN401 - whatever was saved
        """An object of a rank. ValueError for classes that torch does not load."""
        return self._load(MetadataIndex(name))

    def _load(self, index: MetadataIndex) -> Any:  # noqa: ANN401 - a tensor or an object
        info = self._storage[index]
        path = self.folder / info.relative_path
        with path.open("rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        return load_plain(data, f"{path}, bytes {info.offset}..{info.offset + info.length}")


class _LazyPlanner(DefaultSavePlanner):
    """Reads a tensor when it is written."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._sources = sources

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """See torch."""
        source = self._sources.get(write_item.index.fqn)
        return super().resolve_data(write_item) if source is None else source.read().contiguous()


def write_files(folder: Path, tensors: Mapping[str, Source], objects: Mapping[str, Any]) -> None:
    """Writes a distributed checkpoint's files into ``folder``, synced; one tensor is in memory at a time."""
    state: dict[str, Any] = {
        name: torch.empty(source.shape, dtype=source.dtype, device="meta") for name, source in tensors.items()
    }
    state.update(objects)
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
    dcp.save(state, storage_writer=writer, planner=_LazyPlanner(tensors), no_dist=True)

"""Dense tensors that are files: copies of experts for a framework's own checkpoint, without a second copy in memory.

A framework that saves wants whole tensors of the whole model at once. They are laid out in files without a name, mapped
into memory, and written out module by module: what stays in memory beside the pages is the module at hand. The system
reads the rest back when the framework writes it; :meth:`DenseScratch.let_go` makes what was read leave again. The room
on disk comes back when the tensors are forgotten.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

_ALIGNMENT = 64


class MakeTensors(Protocol):
    """Makes tensors of zeros by name."""

    def __call__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Tensors of these shapes and this dtype, in host memory."""
        ...


class DenseScratch:
    """Makes tensors in memory-mapped files without a name; a :class:`MakeTensors`.

    Args:
        folder: where the files lie, on a file system with room for them.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._open: list[tuple[int, mmap.mmap]] = []
        self._settled: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._places: weakref.WeakKeyDictionary[mmap.mmap, range] = weakref.WeakKeyDictionary()

    def __call__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """See :class:`MakeTensors`.

        Raises:
            ValueError: the folder cannot be written, or has no room.
        """
        places: dict[str, tuple[int, int]] = {}
        size = 0
        for name, shape in shapes.items():
            count = torch.Size(shape).numel()
            places[name] = (size, count)
            size += -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if not size:
            return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        fd = self._file(size)
        mapped = mmap.mmap(fd, size)
        self._open.append((fd, mapped))
        start = torch.frombuffer(mapped, dtype=torch.uint8, count=1).data_ptr()
        self._places[mapped] = range(start, start + size)
        return {
            name: torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).view(shapes[name])
            if count
            else torch.zeros(shapes[name], dtype=dtype)
            for name, (offset, count) in places.items()
        }

    def _file(self, size: int) -> int:
        fd = -1
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            fd, path = tempfile.mkstemp(dir=self.folder, prefix=".megascale-export-")
            os.unlink(path)
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise ValueError(
                f"a checkpoint needs {size} bytes of scratch space in {self.folder}: {error.strerror}; free some, or "
                "give another folder"
            ) from error
        return fd

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor in host memory is one of those made here, or a part of one."""
        at = tensor.data_ptr()
        return any(at in place for place in self._places.values())

    def settle(self) -> None:
        """Writes out what was made since the last call, so that its memory can be used for something else."""
        while self._open:
            fd, mapped = self._open.pop()
            mapped.flush()
            mapped.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
            self._settled.add(mapped)

    def let_go(self) -> None:
        """Gives back the memory that reading settled tensors has taken since; they stay as they are."""
        for mapped in self._settled:
            mapped.madvise(mmap.MADV_DONTNEED)


def in_memory(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors as they are everywhere else; a :class:`MakeTensors`."""
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}

"""Every change that a checkpoint makes to a disk, one method each, so that a test can crash after any of them.

[Note: durable]
A file's bytes survive a crash once the file was synced; that a file has a name survives once its folder was synced.
A rename is one change: after a crash either the old or the new name is there. Nothing else is assumed.

[Note: past the page cache]
Large files are written from where their bytes are, without a copy into the system's page cache, where the file system
can do that (O_DIRECT): a copy costs a core, which training beside it would use, and cached bytes push out what is
needed. Direct writes begin and end at whole blocks, in memory and in the file; bytes that do not are collected in a
buffer first, and a file's last bytes go through the cache.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from megascale_omni.checkpoint.digests import Data

BLOCK_BYTES = 4096
"""Direct writes are multiples of this, of memory that begins at a multiple of it."""
_BUFFER_BYTES = 4 << 20


class OpenFile(Protocol):
    """A file that is being written, from its start to its end."""

    def write(self, *parts: Data) -> None:
        """Appends bytes, part after part; it is done with them when it returns."""
        ...

    def sync(self) -> None:
        """Returns when the bytes are on disk."""
        ...

    def close(self) -> None:
        """Ends writing; idempotent."""
        ...


class FileSystem(Protocol):
    """The changes (see [Note: durable]). All of them raise OSError."""

    def make_folder(self, path: Path) -> None:
        """Makes a folder that must not exist."""
        ...

    def create(self, path: Path) -> OpenFile:
        """Makes a file that must not exist."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Returns when the names in a folder are on disk."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Renames a folder, whose new name must be free, or a file, which replaces another one."""
        ...

    def remove(self, path: Path) -> None:
        """Removes a file, or a folder with all that is in it."""
        ...


class LocalFile:
    """A file of the operating system (see [Note: past the page cache])."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._direct = _set_direct(self._fd, wanted=True)
        self._buffer = np.empty(0, np.uint8)
        self._filled = 0
        self._written = 0

    def write(self, *parts: Data) -> None:
        """See :class:`OpenFile`. The bytes are on disk or copied when this returns."""
        run: list[np.ndarray] = []  # goes to the disk in one call
        for part in parts:
            rest = np.frombuffer(part, np.uint8) if len(part) else np.empty(0, np.uint8)
            while len(rest):
                blocks = len(rest) - len(rest) % BLOCK_BYTES
                if not self._direct:
                    run.append(rest)
                    rest = rest[:0]
                elif blocks and not self._filled % BLOCK_BYTES and not _address(rest) % BLOCK_BYTES:
                    self._flush()
                    run.append(rest[:blocks])
                    rest = rest[blocks:]
                else:
                    self._put(run)
                    run = []
                    rest = self._collect(rest)
        self._put(run)

    def _collect(self, rest: np.ndarray) -> np.ndarray:
        """Copies as much as the buffer has room for; what is left."""
        if not len(self._buffer):
            self._buffer = _aligned(_BUFFER_BYTES)
        count = min(len(rest), len(self._buffer) - self._filled)
        np.copyto(self._buffer[self._filled : self._filled + count], rest[:count])
        self._filled += count
        if self._filled == len(self._buffer):
            self._flush()
        return rest[count:]

    def _flush(self) -> None:
        collected, self._filled = self._buffer[: self._filled], 0
        self._put([collected])

    def _put(self, run: Sequence[np.ndarray]) -> None:
        rest = [data for data in run if len(data)]
        while rest:
            total = sum(map(len, rest))
            try:
                count = os.pwritev(self._fd, [part.data for part in rest], self._written)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = _set_direct(self._fd, wanted=False)  # it wants other blocks
                continue
            if self._direct and count < total:
                count -= count % BLOCK_BYTES
            if count <= 0:
                raise OSError(errno.EIO, f"nothing of {total} bytes was written")
            self._written += count
            while rest and count >= len(rest[0]):
                count -= len(rest.pop(0))
            if count:
                rest[0] = rest[0][count:]

    def sync(self) -> None:
        """See :class:`OpenFile`."""
        if self._filled:
            rest = self._buffer[self._filled - self._filled % BLOCK_BYTES : self._filled]
            self._filled -= len(rest)
            self._flush()
            if len(rest):
                self._direct = _set_direct(self._fd, wanted=False)
                self._put([rest])
        os.fsync(self._fd)

    def close(self) -> None:
        """See :class:`OpenFile`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _set_direct(fd: int, *, wanted: bool) -> bool:
    """Switches direct io; whether it is on now."""
    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | direct if wanted else flags & ~direct)
    except OSError:  # of a file system that cannot
        return False
    return wanted and bool(direct)


def _address(data: np.ndarray) -> int:
    address: int = data.__array_interface__["data"][0]
    return address


def _aligned(nbytes: int) -> np.ndarray:
    raw = np.empty(nbytes + BLOCK_BYTES, np.uint8)
    start = -_address(raw) % BLOCK_BYTES
    return raw[start : start + nbytes]


class LocalFileSystem:
    """The operating system's files."""

    def make_folder(self, path: Path) -> None:
        """See :class:`FileSystem`."""
        path.mkdir()

    def create(self, path: Path) -> OpenFile:
        """See :class:`FileSystem`."""
        return LocalFile(path)

    def sync_folder(self, path: Path) -> None:
        """See :class:`FileSystem`."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """See :class:`FileSystem`."""
        if target.is_dir():  # an empty one would be replaced without a word
            raise FileExistsError(f"{target} exists")
        source.rename(target)

    def remove(self, path: Path) -> None:
        """See :class:`FileSystem`."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_file(files: FileSystem, path: Path, data: Data) -> None:
    """A whole small file, synced; its folder is not."""
    file = files.create(path)
    try:
        file.write(data)
        file.sync()
    finally:
        file.close()

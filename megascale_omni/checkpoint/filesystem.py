"""Every change that a checkpoint makes to a disk, one method each, so that a test can crash after any of them.

[Note: durable]
A file's bytes survive a crash once the file was synced; that a file has a name survives once its folder was synced.
A rename is one change: after a crash either the old or the new name is there. Nothing else is assumed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Protocol

from megascale_omni.checkpoint.digests import Data


class OpenFile(Protocol):
    """A file that is being written, from its start to its end."""

    def write(self, data: Data) -> None:
        """Appends bytes."""
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
    """A file of the operating system."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, data: Data) -> None:
        """See :class:`OpenFile`."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def sync(self) -> None:
        """See :class:`OpenFile`."""
        os.fsync(self._fd)

    def close(self) -> None:
        """See :class:`OpenFile`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


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

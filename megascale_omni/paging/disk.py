"""The disk tier: one scratch file, every page at a place of its own.

[Note: scratch file]
The file is preallocated, so that a full disk is an error at start and not in mid-run (where device and host memory have
room for every page nothing need ever be written, and it takes no space until it is), and has no name: it is opened
nameless where the file system can (O_TMPFILE) and unlinked at once otherwise, so that nothing is left behind whatever
ends the process. Reads and writes are direct where the file system allows it: going through the page cache would make
the cache grow by the whole state. Every page has a checksum, taken when it is written and checked when it is read;
bytes that do not match are never handed out.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import resource
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from megascale_omni.config import Checksum
from megascale_omni.paging.layout import SLOT_ALIGNMENT

logger = logging.getLogger(__name__)

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")


class PageIoError(OSError):
    """A page could not be read or written, or what was read is not what was written. Names the page."""


class DiskFile:
    """A nameless, preallocated scratch file in ``folder`` (see [Note: scratch file]).

    Reads and writes may come from several threads; two on the same page at once may not.

    Raises:
        ValueError: the folder is not there, not writable, or has no room for what :meth:`reserve` asks for.
    """

    def __init__(self, folder: str | Path, *, checksum: Checksum = "auto") -> None:
        self.folder = Path(folder)
        self.checksum_name, self._digest = _digest(checksum)
        _check_folder(self.folder)
        self.file_system = file_system_of(self.folder)
        if self.file_system in MEMORY_FILE_SYSTEMS:
            logger.warning(
                "disk path %s is on %s, which is memory: pages put there free no memory; "
                "give a folder on a disk with --megascale-disk-path",
                self.folder,
                self.file_system,
            )
        self._fd, self.direct = _open_nameless(self.folder)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False  # the system does it, after the last thread
        self._size = self._filled = 0
        self._sums: dict[int, int] = {}
        self._seals: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self.bytes_read = 0
        self.bytes_written = 0

    @property
    def size(self) -> int:
        """Bytes reserved or promised."""
        return self._size

    def reserve(self, nbytes: int) -> int:
        """Adds ``nbytes`` to the file, on disk at once; the offset of the first of them."""
        offset = self.promise(nbytes)
        try:
            self.fill()
        except ValueError:
            self._size = offset
            raise
        return offset

    def promise(self, nbytes: int) -> int:
        """The same, but that disk space is taken when something is written there, or by :meth:`fill`."""
        offset, self._size = self._size, self._size + nbytes
        return offset

    def fill(self) -> None:
        """Takes disk space for all that was promised.

        Raises:
            ValueError: there is not enough of it. What was promised stays so: pages know their places.
        """
        nbytes = self._size - self._filled
        if not nbytes:
            return
        system = os.statvfs(self.folder)
        free = system.f_bavail * system.f_frsize
        try:
            if nbytes > free:  # asked first, lest the disk is full for others until the call fails
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self._fd, self._filled, nbytes)
        except OSError as error:
            full, size = error.errno in (errno.ENOSPC, errno.EDQUOT), self._size
            if all(offset < self._filled for offset in self._sums):  # nothing is there yet
                os.ftruncate(self._fd, self._filled)
            limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
            if error.errno == errno.EFBIG and limit != resource.RLIM_INFINITY:
                raise ValueError(
                    f"disk path {self.folder} cannot hold the experts' pages: {size} bytes are needed, and "
                    f"a file of this process may have {limit} (RLIMIT_FSIZE); raise that limit (ulimit -f)"
                ) from error
            raise ValueError(
                f"disk path {self.folder} {'has no room for' if full else 'cannot hold'} the experts' pages: "
                f"{size} bytes are needed, {free} are free ({os.strerror(error.errno or 0)}); "
                "free some, or give another --megascale-disk-path"
            ) from error
        self._filled = self._size

    def write(
        self, offset: int, slot: torch.Tensor, *, name: Callable[[], str], seal: tuple[int, int] | None = None
    ) -> None:
        """Writes a whole slot. ``seal``: what was measured of it where it came from, which goes with these bytes.

        Raises:
            PageIoError: names the page.
        """
        data = _bytes_of(slot)
        try:
            self._whole(os.pwritev, data, offset)
        except OSError as error:
            raise PageIoError(error.errno, f"writing the {name()} failed: {error.strerror or error}") from error
        digest = self._digest(data) if self._digest else 0
        with self._lock:
            self._sums[offset] = digest
            self._seals.pop(offset, None)
            if seal is not None:
                self._seals[offset] = seal
            self.bytes_written += len(data)

    def read(self, offset: int, slot: torch.Tensor, *, name: Callable[[], str]) -> None:
        """Reads a whole slot. Raises PageIoError naming the page, also where the checksum does not match."""
        if offset not in self._sums:
            raise RuntimeError(f"the {name()} is read from disk, but was never written there")
        data = _bytes_of(slot)
        try:
            self._whole(os.preadv, data, offset)
        except OSError as error:
            raise PageIoError(error.errno, f"reading the {name()} failed: {error.strerror or error}") from error
        if self._digest and self._digest(data) != self._sums[offset]:
            raise PageIoError(
                errno.EILSEQ,
                f"reading the {name()} failed: its {self.checksum_name} checksum does not match what was written",
            )
        with self._lock:
            self.bytes_read += len(data)

    def seal(self, offset: int) -> tuple[int, int] | None:
        """What :meth:`write` was given with the bytes that are there now."""
        return self._seals.get(offset)

    def _whole(self, call: Callable[..., int], data: np.ndarray, offset: int) -> None:
        """Repeats a call that may do less than it was asked for."""
        total, done = len(data), 0
        while done < total:
            count = call(self._fd, [data[done:]], offset + done)
            if self.direct and done + count < total:
                count -= count % SLOT_ALIGNMENT  # direct io goes on at whole blocks only
            if count <= 0:
                raise PageIoError(errno.EIO, f"it ended after {done} of {total} bytes")
            done += count

    def close(self) -> None:
        """Closes the file, which removes it. Idempotent."""
        self._close()
        self._fd = -1


def _bytes_of(slot: torch.Tensor) -> np.ndarray:
    view: np.ndarray = slot.view(torch.uint8).numpy()
    return view


def _check_folder(folder: Path) -> None:
    try:
        if folder.is_dir():
            return
        problem = "is not a folder; create it, or"
    except OSError as error:
        problem = f"cannot be reached: {error.strerror};"
    raise ValueError(f"disk path {folder} {problem} give another --megascale-disk-path")


def _open_nameless(folder: Path) -> tuple[int, bool]:
    """A file descriptor, and whether it does direct io."""
    flags = os.O_RDWR | os.O_CLOEXEC
    for direct in (getattr(os, "O_DIRECT", 0), 0):
        try:
            return os.open(folder, flags | direct | os.O_TMPFILE, 0o600), bool(direct)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT):
                raise ValueError(
                    f"disk path {folder} cannot be written: {error.strerror}; give another --megascale-disk-path"
                ) from error
    for direct in (getattr(os, "O_DIRECT", 0), 0):
        try:
            fd, path = tempfile.mkstemp(dir=folder, prefix=".megascale-")
            os.close(fd)
            try:
                return os.open(path, flags | direct, 0o600), bool(direct)
            finally:
                os.unlink(path)
        except OSError as error:
            if not direct:
                raise ValueError(
                    f"disk path {folder} cannot be written: {error.strerror}; give another --megascale-disk-path"
                ) from error
    raise AssertionError("unreachable")


def file_system_of(folder: Path) -> str:
    """Type of the file system that holds ``folder``, e.g. ``ext4``; ``unknown`` where the system does not say."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    best, kind = "", "unknown"
    resolved = str(folder.resolve())
    for line in lines:
        fields, _, rest = line.partition(" - ")
        mount = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields.split()[4])
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, rest.split()[0]
    return kind


def _digest(checksum: Checksum) -> tuple[str, Callable[[np.ndarray], int] | None]:
    """Name and function of a checksum; ``auto`` is xxh3 where the package xxhash is installed, crc32 otherwise."""
    if checksum not in get_args(Checksum):
        raise ValueError(f"page checksum {checksum!r} is unknown; choose one of {', '.join(get_args(Checksum))}")
    if checksum == "off":
        return "off", None
    if checksum != "crc32":
        try:
            import xxhash
        except ImportError:
            if checksum == "xxh3":
                raise ImportError(
                    "page checksum 'xxh3' needs xxhash: pip install 'megascale[paging]', or use crc32"
                ) from None
        else:
            return "xxh3", lambda data: int(xxhash.xxh3_64_intdigest(data))
    return "crc32", lambda data: zlib.crc32(data)

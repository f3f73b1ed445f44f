"""Checksums of files: ``name:hex``. xxh3_128 where the package xxhash is installed, sha256 otherwise."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

_READ_BYTES = 1 << 20
Data = bytes | bytearray | memoryview
"""Bytes that may belong to somebody else."""


class Digest(Protocol):
    """A checksum that is being taken."""

    def update(self, data: Data, /) -> None:
        """Adds bytes."""
        ...

    def hexdigest(self) -> str:
        """The checksum of all bytes so far."""
        ...


def default_name() -> str:
    """The checksum that new checkpoints use."""
    try:
        import xxhash  # noqa: F401 - only whether it is there
    except ImportError:
        return "sha256"
    return "xxh3_128"


def new(name: str) -> Digest:
    """A checksum by name.

    Raises:
        ValueError: an unknown name, or one whose package is not installed; names the remedy.
    """
    if name == "sha256":
        return hashlib.sha256()
    if name == "xxh3_128":
        try:
            import xxhash
        except ImportError as error:
            raise ValueError(
                "the checkpoint has xxh3_128 checksums: pip install 'megascale[paging]' to check them"
            ) from error
        digest: Digest = xxhash.xxh3_128()
        return digest
    raise ValueError(f"checksum {name!r} is unknown; known: xxh3_128, sha256")


def of_bytes(data: Data, *, name: str) -> str:
    """``name:hex`` of some bytes."""
    digest = new(name)
    digest.update(data)
    return f"{name}:{digest.hexdigest()}"


def of_file(path: Path, *, name: str) -> str:
    """``name:hex`` of a file's bytes. Raises OSError where it cannot be read."""
    digest = new(name)
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(_READ_BYTES)
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return f"{name}:{digest.hexdigest()}"

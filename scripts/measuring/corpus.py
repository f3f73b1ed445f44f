"""The text that measurements train on where no other is given."""

import sysconfig
from pathlib import Path

from scripts.build_corpus import build


def standard_library_corpus(folder: Path, *, max_bytes: int = 2_000_000) -> Path:
    """Write the standard library's own sources into `folder` and return the file."""
    path = folder / "corpus.txt"
    build(path, library=Path(sysconfig.get_path("stdlib")), max_bytes=max_bytes)
    return path

"""JSON files of results."""

import errno
import json
import math
from pathlib import Path


def write_json(path: Path, content: object) -> None:
    """Write a result, whole or not at all; numbers that JSON does not have become the strings "inf", "-inf", "nan"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(finite(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def check_writable(*paths: Path | None) -> None:
    """Before work that takes minutes: whether its results can be written. Makes their folders.

    Raises:
        ValueError: with the path and the reason.
    """
    for path in paths:
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "it is a folder")
            probe = path.with_name(path.name + ".part")
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}; give another path") from error


def finite(content: object) -> object:
    """The same content with every non-finite number as a string."""
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(value) for value in content]
    return content

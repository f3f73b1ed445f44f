"""What a run was configured with, as its manifests say it: plain values, to be read and compared."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

LEFT_OUT = object()
"""What has no text of its own."""


def plain(value: object) -> Any:  # noqa: ANN401 - JSON
    """A configuration as JSON has it, the same text for the same configuration.

    Dataclasses become mappings; enumerations, functions and classes their names; dtypes, paths and devices texts. Other
    objects are left out of what holds them: their text would be another one in each process.
    """
    found = _plain(value)
    return None if found is LEFT_OUT else found


def _plain(value: object) -> Any:  # noqa: ANN401
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _mapping({field.name: getattr(value, field.name, LEFT_OUT) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, set | frozenset):
        return sorted((item for item in map(_plain, value) if item is not LEFT_OUT), key=str)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [item for item in map(_plain, value) if item is not LEFT_OUT]
    if isinstance(value, torch.dtype | torch.device | os.PathLike):
        return str(value)
    name = getattr(value, "__qualname__", None)
    return LEFT_OUT if name is None else f"{getattr(value, '__module__', '')}.{name}"


def _mapping(values: Mapping[Any, object]) -> dict[str, Any]:
    found = {str(name): _plain(item) for name, item in values.items()}
    return {name: item for name, item in found.items() if item is not LEFT_OUT}


def version_of(configuration: Mapping[str, Any]) -> str:
    """A short text that is another one for another configuration."""
    text = json.dumps(configuration, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]

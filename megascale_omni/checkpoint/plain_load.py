"""What frameworks wrote with ``torch.save``, read without running code from it.

Files of Megatron and DeepSpeed hold objects of their own classes among the tensors: loss scalers, enumerations, places
in buffers. ``weights_only=True`` refuses those, and the frameworks are not imported here. Each of their classes that a
file names is let through as :class:`Opaque`, which keeps what it was made with and does nothing; any other class makes
the file unreadable, by name.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch


class Opaque:
    """Stands for an object of a class that is not imported: ``args`` it was made with, its fields as attributes."""

    def __init__(self, *args: object) -> None:
        self.args = args


def load_plain(data: bytes | Path, what: str, *, framework: str = "megatron") -> Any:  # noqa: ANN401 - what was saved
    """What ``torch.save`` wrote, into bytes or a file; tensors of a file stay there until they are read.

    Classes of ``framework``'s package are let through as :class:`Opaque`.

    Raises:
        ValueError: damaged, or a class that is not let through; names ``what``.
    """
    from argparse import Namespace
    from signal import Signals
    from types import SimpleNamespace

    import numpy as np

    def source() -> Any:  # noqa: ANN401 - torch takes both
        return io.BytesIO(data) if isinstance(data, bytes) else data

    reconstruct = np.zeros(1).__reduce__()[0]
    allowed: list[Any] = [Namespace, SimpleNamespace, Signals, io.BytesIO, np.ndarray, np.dtype, reconstruct]
    allowed.append(type(np.dtype("u4")))
    try:
        for name in torch.serialization.get_unsafe_globals_in_checkpoint(source()):
            if name.startswith(f"{framework}."):
                allowed.append((type(name.rpartition(".")[2], (Opaque,), {}), name))
        with torch.serialization.safe_globals(allowed):
            return torch.load(source(), map_location="cpu", weights_only=True, mmap=isinstance(data, Path) or None)
    except (OSError, EOFError, RuntimeError, KeyError, ValueError, pickle.UnpicklingError) as error:
        lines = str(error).splitlines() or [""]
        told = next((line for line in lines if "WeightsUnpickler error" in line), lines[0])  # without torch's advice
        raise ValueError(f"{what} cannot be read: {type(error).__name__}: {told.strip()}") from error

"""The tensors of a `torch_dist` checkpoint, whole, read without any training framework."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor by its key; weights, masters and moments, of dense layers and experts."""
    reader = FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    found: dict[str, torch.Tensor] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(found, storage_reader=reader, no_dist=True)
    return found


def different(first: Path, second: Path) -> list[str]:
    """Keys that only one checkpoint has, or whose bits differ.

    Raises:
        ValueError: the first has no experts' moments, so that nothing would be proved.
    """
    one, two = stored_tensors(first), stored_tensors(second)
    if not any("exp_avg_sq" in key and "experts" in key for key in one):
        raise ValueError(f"{first} has no optimizer state of experts: it has {', '.join(sorted(one)[:5])} ...")
    names = sorted(one.keys() ^ two.keys())
    return names + [key for key in sorted(one.keys() & two.keys()) if not _same(one[key], two[key])]


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (
        first.dtype is second.dtype
        and first.shape == second.shape
        and torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
    )

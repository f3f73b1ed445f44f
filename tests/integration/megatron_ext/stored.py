"""What a checkpoint of the project's own format holds, whatever layout it was saved at."""

from pathlib import Path

import torch

from megascale_omni.checkpoint.checkpointer import Checkpointer
from megascale_omni.checkpoint.datafile import NAMES, read_into


def contents(root: Path | str, tag: str | None = None) -> dict[str, torch.Tensor]:
    """Every dense tensor but random numbers, and every plane of every page with its last step, by name."""
    opened = Checkpointer(root).open(tag)
    assert opened is not None
    found = {name: opened.dense.read(name) for name in opened.dense.tensors if not name.startswith("rng.")}
    for (path, expert), pages in opened.pages.pages.items():
        for page in pages:
            name = f"{path} {expert} {page.at[2]}..{page.stop}"
            found[f"{name} last_step"] = torch.tensor(page.last_step)
            for label, place in page.planes.items():
                dtype = NAMES[place.dtype]
                tensor = torch.empty((place.end - place.begin) // dtype.itemsize, dtype=dtype)
                read_into(opened.folder, place, tensor)
                found[f"{name} {label}"] = tensor
    return found


def different(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """Names that only one has, or whose bits differ."""
    names = sorted(first.keys() ^ second.keys())
    return names + [n for n in sorted(first.keys() & second.keys()) if not torch.equal(first[n], second[n])]

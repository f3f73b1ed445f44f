"""Folders that are given to be loaded from, and are not what is expected there.

Stock loads the checkpoint that a tracker file in the folder names. Where there is no such file it trains from random
weights, as the first start of a run must whose ``--load`` is its ``--save``. A folder that is itself a checkpoint has
no tracker either, and the run would begin anew with a line in the log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from megascale_omni.checkpoint.store import is_checkpoint, is_store

TRACKER = "latest_checkpointed_iteration.txt"
_WHOLE = "metadata.json"
"""The last that stock writes into a checkpoint."""
_PARTS = (_WHOLE, ".metadata", "common.pt", "mp_rank_*", "*.distcp")
_ITERATION = re.compile(r"iter_(\d+)")


def check_load(folder: str | Path, *, step: int | None = None) -> None:
    """Refuses a folder that a run would load nothing from, although it is a checkpoint or holds one.

    ``step``: the iteration that was asked for; stock needs no tracker then. A folder that is not there, is empty, or
    holds what an interrupted first save left is none of these: the run begins.

    Raises:
        ValueError: names the folder and what to give instead.
    """
    root = Path(folder)
    if not root.is_dir() or (root / TRACKER).is_file() or is_store(root):
        return
    if is_checkpoint(root) or any(any(root.glob(part)) for part in _PARTS):
        there = root.resolve()
        found = _ITERATION.fullmatch(there.name)
        which = f" --ckpt-step {int(found[1])}" if found else ""
        raise ValueError(
            f"--load {folder} is a checkpoint itself, and wanted is the folder that checkpoints lie in: "
            f"give --load {there.parent}{which}"
        )
    if step is not None or (root / "non_persistent").is_dir():
        return
    steps = sorted(
        int(found[1])
        for child in root.iterdir()
        if (found := _ITERATION.fullmatch(child.name)) and (child / _WHOLE).is_file()
    )
    if steps:
        raise ValueError(
            f"--load {folder} holds checkpoints (of iterations {', '.join(map(str, steps))}), but no {TRACKER}, which "
            f"would name the one to load: add --ckpt-step {steps[-1]}"
        )


def check_formats(*, load: str | None, save: str | None, paged: bool, asked: Mapping[str, str]) -> None:
    """Refuses what the format of checkpoints that lie in a folder does not allow.

    ``paged``: whether this run saves in the project's own format. ``asked``: flags of stock that were given and need
    its own format where they load, each with what to do instead.

    Raises:
        ValueError: names the folder and what to give instead.
    """
    if load is not None and is_store(Path(load)):
        for flag, remedy in asked.items():
            raise ValueError(f"{flag} is not supported with a checkpoint of the paged format ({load}); {remedy}")
    if save is None:
        return
    if Path(save).exists() and not Path(save).is_dir():
        raise ValueError(f"--save {save} is no folder")
    if not paged and is_store(Path(save)):
        raise ValueError(
            f"--save {save} holds checkpoints of the paged format, which would be loaded again, and not those of "
            "stock's format that this run saves; give another folder, or --megascale-checkpoint-format paged"
        )

"""Stock Megatron-Core 0.16.1 on CPU and gloo.

`enable()` makes the few changes that stock needs to train without an accelerator, `disable()` puts back every original
object. Each change is a named patch (`PATCHES`); none of them touches `torch` itself. With an accelerator present
`enable()` refuses: there stock runs as it is.
"""

from collections.abc import Iterable

import torch

from megatron_ext.cpu_patches import model as _model  # noqa: F401  (importing them fills the table)
from megatron_ext.cpu_patches import moe as _moe  # noqa: F401
from megatron_ext.cpu_patches import training as _training  # noqa: F401
from megatron_ext.cpu_patches.edits import Edit
from megatron_ext.cpu_patches.registry import PATCHES
from megatron_ext.megatron_lm.install import active

__all__ = ["PATCHES", "disable", "enable", "enabled"]

_applied: dict[str, list[Edit]] = {}


def enable(names: Iterable[str] | None = None) -> None:
    """Apply the named patches (default: all of them). Those already applied stay as they are.

    Raises:
        RuntimeError: an accelerator is present, or a place in stock is not what its patch expects: nothing is
            changed then.
        ValueError: a name that is no patch.
    """
    wanted = list(PATCHES if names is None else names)
    unknown = [name for name in wanted if name not in PATCHES]
    if unknown:
        raise ValueError(f"no CPU patch is named {unknown}; there are {sorted(PATCHES)}")
    if active() is not None:
        return  # code of a checkout of Megatron-LM, core included, is made ready for the CPU while it is imported
    if torch.cuda.is_available():
        raise RuntimeError(
            f"CPU patches are for machines without an accelerator, and this one has {torch.cuda.get_device_name()}: "
            "train on it, or hide it with CUDA_VISIBLE_DEVICES="
        )
    new: dict[str, list[Edit]] = {}
    try:
        for name in wanted:
            if name not in _applied and name not in new:
                new[name] = []
                for edit in PATCHES[name]():
                    edit.apply()
                    new[name].append(edit)
    except BaseException:
        _undo(new)
        raise
    _applied.update(new)


def disable() -> None:
    """Undo every applied patch. Safe to call when none is."""
    _undo(_applied)


def enabled() -> tuple[str, ...]:
    """Names of the patches in force, in the order they were applied."""
    return tuple(_applied)


def _undo(applied: dict[str, list[Edit]]) -> None:
    while applied:
        _, edits = applied.popitem()
        for edit in reversed(edits):
            edit.undo()

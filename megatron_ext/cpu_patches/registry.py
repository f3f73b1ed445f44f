"""The table of CPU patches by name."""

from collections.abc import Callable, Sequence

from megatron_ext.cpu_patches.edits import Edit

PatchFunction = Callable[[], Sequence[Edit]]

PATCHES: dict[str, PatchFunction] = {}


def patch(function: PatchFunction) -> PatchFunction:
    """Enter a patch function into the table under its own name."""
    if function.__name__ in PATCHES:
        raise RuntimeError(f"two CPU patches are named {function.__name__!r}")
    PATCHES[function.__name__] = function
    return function

"""What all ranks must say alike before the first step: which modules (MPUs) there are, and whose experts are which."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from megascale_omni.clipping.mpus import MpuMap, mpus_for
from megascale_omni.clipping.settings import ClipConfig


def agreed_mpus(config: ClipConfig, names: Iterable[str]) -> MpuMap:
    """The same map on every rank, from the parameters that each has. A collective of all ranks.

    Raises:
        ValueError: what ``clip.mpus`` asks for does not fit the model; on every rank, also where only one cannot read
        the file.
    """
    of_ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, sorted(set(names)))
    problem, mpus = None, None
    try:
        mpus = mpus_for(config.mpus, sorted({name for rank in of_ranks for name in rank}))
    except ValueError as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for found in problems:
        if found is not None:
            raise ValueError(found)
    assert mpus is not None
    return mpus


def mpu_of_experts(mpus: MpuMap, path: str, tensors: Iterable[str]) -> int:
    """The place in ``mpus.names`` of the experts at ``path``, from the names of all their tensors.

    Raises:
        ValueError: they are of several modules.
    """
    found = {mpus.index(name) for name in tensors}
    if len(found) != 1:
        modules = ", ".join(mpus.names[index] for index in sorted(found))
        raise ValueError(f"clip.mpus divides the experts of {path} among {modules}; their pages are one module's")
    return found.pop()


def say_what_changes(config: ClipConfig, *, base: float, mpus: MpuMap) -> str:
    """What the log says when a run starts."""
    return (
        f"gradients are clipped by module (CMSA, alpha {config.alpha}, base {base:g}): {', '.join(mpus.names)}. This "
        "changes the mathematics"
    )

"""What all ranks must say alike before the first step: which modules (MPUs) there are, and whose experts are which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megascale_omni.clipping.mpus import MpuMap, mpus_for
from megascale_omni.clipping.settings import ClipConfig
from megascale_omni.ranks import all_or_none, of_run


def agreed_mpus(config: ClipConfig, names: Iterable[str]) -> MpuMap:
    """The same map on every rank, from the parameters that each has. A collective of all ranks.

    Raises:
        ValueError: what ``clip.mpus`` asks for does not fit the model, or ranks read different files; on every rank,
        also where only one cannot read the file.
    """
    every = sorted({name for rank in of_run().gather(sorted(set(names))) for name in rank})
    mpus = all_or_none(lambda: mpus_for(config.mpus, every))
    rules = of_run().gather((mpus.names, mpus.rules))
    for rank, found in enumerate(rules):
        if found != rules[0]:
            raise ValueError(
                f"clip.mpus is not the same on all ranks: rank 0 has the modules {', '.join(rules[0][0])} by "
                f"{dict(rules[0][1])}, rank {rank} {', '.join(found[0])} by {dict(found[1])}; give all one file"
            )
    return mpus


def agreed_experts(mpus: MpuMap, tensors: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """By path of the paged experts on this rank, the place in ``mpus.names`` of all their tensors' names.

    A collective of all ranks, which may have different experts, or none.

    Raises:
        ValueError: experts of any rank are of several modules; on every rank.
    """
    return all_or_none(lambda: {path: _mpu_of_experts(mpus, path, names) for path, names in tensors.items()})


def _mpu_of_experts(mpus: MpuMap, path: str, tensors: Iterable[str]) -> int:
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

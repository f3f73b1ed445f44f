"""The pieces of gradients that a rank holds, and how sums over them are made the whole model's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

_EXPERT = re.compile(r"^(?:.*\.)?(?:local_experts|experts|deepspeed_experts)\.\d+(?=\.|$)")
_STACKED = re.compile(r"(?:^|\.)experts\.")


@dataclass(frozen=True)
class GradientPart:
    """What a rank holds of one parameter's gradient: all of it, or a shard.

    Attributes:
        name: the parameter's, which decides its module (MPU).
        gradient: elements in any shape, dtype and place.
        share: 1 / the number of ranks that hold the same elements and will be summed.
        experts: consecutive pieces of the flattened gradient as (expert, elements), where the parameter is one or more
            experts'. An expert whose elements are zero on all ranks got no tokens, and does not count.
    """

    name: str
    gradient: torch.Tensor
    share: float = 1.0
    experts: tuple[tuple[str, int], ...] = ()


class Ranks(Protocol):
    """How the ranks of a run put their sums together."""

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def reduce(self, sums: torch.Tensor, largest: torch.Tensor) -> None:
        """Adds ``sums`` (fp64, on the CPU) over all ranks and takes the maximum of ``largest``, in place."""
        ...

    def gather(self, text: str | None) -> list[str | None]:
        """Every rank's text, by rank."""
        ...


class Alone:
    """One process, or ranks that all hold the whole gradient."""

    size = 1

    def reduce(self, sums: torch.Tensor, largest: torch.Tensor) -> None:
        """Nothing to do."""

    def gather(self, text: str | None) -> list[str | None]:
        """The text itself."""
        return [text]


@dataclass(frozen=True)
class Group:
    """The ranks of a process group (None: all); ``device``: where its backend takes tensors from."""

    group: dist.ProcessGroup | None = None
    device: torch.device | str = "cpu"

    @property
    def size(self) -> int:
        """See :class:`Ranks`."""
        return dist.get_world_size(self.group)

    def reduce(self, sums: torch.Tensor, largest: torch.Tensor) -> None:
        """See :class:`Ranks`. A collective."""
        for tensor, operation in ((sums, dist.ReduceOp.SUM), (largest, dist.ReduceOp.MAX)):
            there = tensor.to(self.device)
            dist.all_reduce(there, op=operation, group=self.group)
            if there is not tensor:
                tensor.copy_(there)

    def gather(self, text: str | None) -> list[str | None]:
        """See :class:`Ranks`. A collective."""
        found: list[str | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, text, group=self.group)
        return found


def expert_pieces(
    name: str, shape: torch.Size | tuple[int, ...], *, offset: int = 0, numel: int | None = None
) -> tuple[tuple[str, int], ...]:
    """How a flat piece of a parameter (``numel`` elements from ``offset`` on) divides into experts.

    A parameter under ``experts.N.`` is expert N's; a parameter with three dimensions under ``experts.`` is a stack of
    experts along the first. () for any other.
    """
    total = prod(shape)
    numel = total - offset if numel is None else numel
    found = _EXPERT.match(name)
    if found is not None:
        return ((found[0], numel),) if numel else ()
    if len(shape) != 3 or not _STACKED.search(name) or not total:
        return ()
    each = total // shape[0]
    pieces = []
    position, end = offset, offset + numel
    while position < end:
        expert = position // each
        stop = min(end, (expert + 1) * each)
        pieces.append((f"{name}[{expert}]", stop - position))
        position = stop
    return tuple(pieces)


def expert_names(name: str, shape: torch.Size | tuple[int, ...]) -> tuple[str, ...]:
    """All experts that a parameter has elements of."""
    return tuple(expert for expert, _ in expert_pieces(name, shape))


def parts_of(parameters: Iterable[tuple[str, torch.Tensor]], *, ranks: int = 1) -> Iterator[GradientPart]:
    """The gradients of named parameters, DTensors (FSDP2, tensor parallelism) included, where they have one.

    ``ranks``: how many will be summed. All of them hold every parameter: each the whole of an ordinary tensor's
    gradient, and of a DTensor's what its mesh says, again and again where the mesh is a part of the ranks.

    Raises:
        ValueError: a gradient that is not reduced yet (a DTensor with a Partial placement), one that is divided among
        more ranks than will be summed, or a sparse one.
    """
    for name, parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            raise ValueError(f"the gradient of {name} is sparse; use sparse=False in its embedding")
        if isinstance(parameter.grad, DTensor):
            yield _part_of_dtensor(name, parameter.grad, ranks)
        else:
            gradient = parameter.grad
            yield GradientPart(name, gradient, 1.0 / ranks, expert_pieces(name, parameter.shape))


def _part_of_dtensor(name: str, gradient: DTensor, ranks: int) -> GradientPart:
    mesh = gradient.device_mesh
    if mesh.size() > ranks:
        raise ValueError(
            f"the gradient of {name} is divided among {mesh.size()} ranks, and sums of {ranks} are put together; give "
            "the clipper ranks=Group()"
        )
    replicas = ranks / mesh.size()
    for dimension, placement in enumerate(gradient.placements):
        if isinstance(placement, Partial):
            raise ValueError(f"the gradient of {name} is not reduced yet ({placement}); clip after it is")
        if isinstance(placement, Replicate):
            replicas *= mesh.size(dimension)
    return GradientPart(name, gradient.to_local(), 1.0 / replicas, _experts_of_dtensor(name, gradient))


def _experts_of_dtensor(name: str, gradient: DTensor) -> tuple[tuple[str, int], ...]:
    local = gradient.to_local()
    pieces = expert_pieces(name, gradient.shape)
    if not pieces or not local.numel():
        return ()
    if len(pieces) == 1:
        return ((pieces[0][0], local.numel()),)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(gradient.shape, gradient.device_mesh, gradient.placements)
    each = local.numel() // local.shape[0]
    return tuple((f"{name}[{offsets[0] + row}]", each) for row in range(local.shape[0]))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's shard on this rank; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

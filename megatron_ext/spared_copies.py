"""Copies that stock's distributed checkpoints make of experts, and need not.

[Note: late copies]
Part of a larger tensor is written as a copy, or all of that tensor would be. Stock makes all such copies before it
writes the first: where gate and up weights are one tensor they are a second model in memory. Nothing changes a tensor
while training waits for its save, so that each copy is made when its turn comes, and forgotten after it. Where a child
process saves beside training, the same goes for tensors that were made for this save.

[Note: joined in place]
What was stored in parts is joined when it is loaded: gate and up weights of all experts, one more model in memory. The
parts were read into one tensor, one behind the other, so that this tensor is what they are joined to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from io import BytesIO
from typing import Any, Protocol

import torch

RELEASE_BYTES = 32 * 2**20
"""Written bytes after which memory is given back."""

WriteBucket = tuple[Any, Any, tuple[Any, Any]]
"""Stock's: file, its key, (objects, tensors), each as pairs of an item of the plan and its data."""


class Planner(Protocol):
    """What a writer asks for the data of an item."""

    def resolve_data(self, item: Any) -> torch.Tensor | BytesIO:  # noqa: ANN401 - torch's
        """The data."""
        ...


def _any(tensor: torch.Tensor) -> bool:
    return True


class WithoutData:
    """A planner whose host tensors have shapes only: stock leaves alone what is not in host memory.

    ``spared``: which of them; all where nothing is given.
    """

    def __init__(self, planner: Planner, spared: Callable[[torch.Tensor], bool] = _any) -> None:
        self._planner, self._spared = planner, spared

    def resolve_data(self, item: Any) -> torch.Tensor | BytesIO:  # noqa: ANN401 - torch's
        """See :class:`Planner`."""
        found = self._planner.resolve_data(item)
        spared = isinstance(found, torch.Tensor) and found.is_cpu and self._spared(found)
        return found.to("meta") if isinstance(found, torch.Tensor) and spared else found


def with_data(buckets: Iterable[WriteBucket], planner: Planner) -> list[WriteBucket]:
    """What was planned with :class:`WithoutData`, with the tensors themselves, views where they are parts."""
    return [
        (path, key, (objects, [(item, _resolved(planner, item) if t.is_meta else t) for item, t in tensors]))
        for path, key, (objects, tensors) in buckets
    ]


def _resolved(planner: Planner, item: Any) -> torch.Tensor:  # noqa: ANN401 - torch's
    found = planner.resolve_data(item)
    assert isinstance(found, torch.Tensor)
    return found.detach()


class OneByOne:
    """The tensors of a bucket, each copied for its turn where it is part of a larger one (see [Note: late copies]).

    Args:
        tensors: with their items. release: is called now and then, when what was written can leave memory.
    """

    def __init__(self, tensors: Iterable[tuple[Any, torch.Tensor]], release: Callable[[], None]) -> None:
        self._tensors, self._release = tensors, release

    def __iter__(self) -> Iterator[tuple[Any, torch.Tensor]]:
        written = 0
        for item, tensor in self._tensors:
            is_part = tensor.untyped_storage().nbytes() != tensor.nbytes
            yield item, tensor.clone() if is_part else tensor
            written += tensor.nbytes
            if written >= RELEASE_BYTES:
                self._release()
                written = 0
        self._release()


def late_bucket(bucket: WriteBucket, release: Callable[[], None]) -> WriteBucket:
    """A bucket whose tensors are copied one by one."""
    path, key, (objects, tensors) = bucket
    return path, key, (objects, OneByOne(tensors, release))


def join_in_place(factory: Any) -> None:  # noqa: ANN401 - stock's ShardedTensorFactory
    """Makes stock's factory join loaded parts where they lie (see [Note: joined in place])."""
    factory.merge_fn = partial(_joined, factory.merge_fn)


def _joined(merge: Callable[[Any], Any], parts: Any) -> Any:  # noqa: ANN401 - stock's
    return in_one_piece(parts) if _follow_each_other(parts) else merge(parts)


def _follow_each_other(parts: Any) -> bool:  # noqa: ANN401 - stock's
    if not isinstance(parts, list) or not parts or not all(isinstance(p, torch.Tensor) and p.dim() for p in parts):
        return False
    first = parts[0]
    at = first.data_ptr()
    for part in parts:
        alike = part.dtype is first.dtype and part.shape[1:] == first.shape[1:] and part.is_contiguous()
        here = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and part.data_ptr() == at
        if not (alike and here):
            return False
        at += part.nbytes
    return True


def in_one_piece(parts: list[torch.Tensor]) -> torch.Tensor:
    """Contiguous tensors that follow each other in one memory, as one view ``[sum of first dimensions, ...]``."""
    rows = sum(part.shape[0] for part in parts)
    first = parts[0]
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())

"""Ranks that do something together: all of them, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Ranks(Protocol):
    """Ranks that call the same methods in the same order. Each waits no longer than its group's timeout."""

    rank: int
    size: int

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        ...

    def all(self, value: bool) -> bool:
        """Whether ``value`` is true on every rank; cheap enough for every step."""
        ...


class SingleRank:
    """A process that is alone."""

    rank = 0
    size = 1

    def gather(self, value: T) -> list[T]:
        """See :class:`Ranks`."""
        return [value]

    def all(self, value: bool) -> bool:
        """See :class:`Ranks`."""
        return value


class GroupRanks:
    """The ranks of a process group (default: all)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, value: T) -> list[T]:
        """See :class:`Ranks`."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def all(self, value: bool) -> bool:
        """See :class:`Ranks`."""
        if self.size == 1:
            return value
        cuda = dist.get_backend(self.group) == "nccl"
        flag = torch.tensor([int(value)], device="cuda" if cuda else "cpu")
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.group)
        return bool(flag.item())


def of_run() -> Ranks:
    """All ranks of ``torch.distributed`` where it is initialised, else this process."""
    return GroupRanks() if dist.is_available() and dist.is_initialized() else SingleRank()


def described(error: BaseException) -> str:
    """An error as other ranks are told of it."""
    return f"{type(error).__name__}: {error}"


def first_of(errors: Sequence[str | None]) -> str | None:
    """Of all ranks' errors the first one, with its rank; the same text on every rank. None where there is none."""
    return next((f"{text} (rank {rank})" for rank, text in enumerate(errors) if text is not None), None)


def all_or_none(
    work: Callable[[], T], *, kind: type[Exception] = ValueError, doing: str = "", ranks: Ranks | None = None
) -> T:
    """What ``work`` returns, where no rank (default: of the run) fails in it; else every rank raises. A collective.

    ``work`` may do something else on each rank, or nothing on most, and must not communicate. ``doing`` begins the
    message; it ends with the rank where not all have said the same.

    Raises:
        kind: where that is what ``work`` raised. RuntimeError: where it was anything else, with the name of its class.
    """
    told: tuple[bool, str] | None = None
    cause: Exception | None = None
    made: list[T] = []
    try:
        made.append(work())
    except Exception as error:  # of whatever class: the other ranks wait to be told
        cause, told = error, (isinstance(error, kind), str(error) if isinstance(error, kind) else described(error))
    found = (ranks or of_run()).gather(told)
    failed = [(rank, answer) for rank, answer in enumerate(found) if answer is not None]
    if not failed:
        return made[0]
    alike = len(failed) == len(found) and len({text for _, (_, text) in failed}) == 1
    text = failed[0][1][1] if alike else "; ".join(f"{text} (rank {rank})" for rank, (_, text) in failed)
    expected = all(is_expected for _, (is_expected, _) in failed)
    raise (kind if expected else RuntimeError)(f"{doing}: {text}" if doing else text) from cause

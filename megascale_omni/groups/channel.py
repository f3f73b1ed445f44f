"""What the ranks of one expert-parallel group say to each other. Every failure names the ranks that are gone.

[Note: no new communicators]
All traffic uses the parent group: collectives with uneven splits where every rank may take part, batched sends and
receives where only the members of an expert's group do. A rank that is in none of the transfers is not involved and
does not wait.

[Note: naming who is gone]
When a rank dies, every survivor is to notice, because those that do not answer are named. Transports without that
property pass values on from neighbour to neighbour (gloo's all-gather goes round a ring, its broadcast down a tree): a
survivor with living neighbours goes on waiting, and would be taken for dead. So with gloo all ranks exchange directly
what one gathers or broadcasts; the bytes are the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

Result = TypeVar("Result")

_KEY = "megascale/alive/{}"
_ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class Transfer:
    """One tensor between this rank and ``peer`` (rank in the group): sent, or received into ``tensor``."""

    peer: int
    tensor: torch.Tensor
    sends: bool


class Transfers:
    """Transfers on their way; :meth:`wait` before the tensors are touched again."""

    def __init__(self, channel: Channel, transfers: Sequence[Transfer]) -> None:
        self._channel = channel
        moving = [t for t in transfers if t.tensor.numel()]
        operations = [
            dist.P2POp(dist.isend if t.sends else dist.irecv, t.tensor, channel.global_ranks[t.peer], channel.group)
            for t in moving
        ]

        def start() -> list[dist.Work]:
            return dist.batch_isend_irecv(operations) if operations else []

        self._works = channel.guarded(start, "starting to send and receive")

    def wait(self) -> None:
        """Returns when all are done. RuntimeError, naming the ranks that are gone, where one cannot be."""
        for work in self._works:
            self._channel.guarded(work.wait, "sending and receiving")
        self._works = []


class Channel:
    """A process group as the dispatcher uses it. With ``group`` None there is this rank alone.

    Attributes: rank, size: in the group. global_ranks: of its members.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        alone = group is None or dist.get_world_size(group) == 1
        self.group = None if alone else group
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self.size = 1 if self.group is None else dist.get_world_size(self.group)
        self.global_ranks = (0,) if self.group is None else tuple(dist.get_process_group_ranks(self.group))

    @property
    def _names_the_gone(self) -> bool:
        """See [Note: naming who is gone]; other transports end the process by a watchdog of their own."""
        return self.group is not None and dist.get_backend(self.group) == "gloo"

    def exchange(self, values: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """``send[p]`` rows of ``values`` to each rank ``p``; returns ``receive[p]`` rows of each, by rank."""
        if self.group is None:
            return values.clone()
        result = values.new_empty(sum(receive), *values.shape[1:])
        given = values.contiguous()
        splits = (list(receive), list(send))
        self.guarded(
            lambda: dist.all_to_all_single(result, given, *splits, group=self.group), "exchanging rows of tokens"
        )
        return result

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """``[P, ...]``: the tensor of every rank, which all have one shape."""
        if self.group is None:
            return values.unsqueeze(0)
        given = values.contiguous().view(-1)
        result = values.new_empty(self.size * values.numel())
        if self._names_the_gone:
            copies = given.repeat(self.size)
            self.guarded(lambda: dist.all_to_all_single(result, copies, group=self.group), "exchanging counts")
        else:
            dist.all_gather_into_tensor(result, given, group=self.group)
        return result.view(self.size, *values.shape)

    def broadcast(self, values: torch.Tensor, *, source: int) -> None:
        """``values`` of rank ``source`` (in the group) into those of all others."""
        if self.group is None:
            return
        if not self._names_the_gone:
            dist.broadcast(values, src=self.global_ranks[source], group=self.group)
            return
        others = [peer for peer in range(self.size) if peer != source]
        sends = self.rank == source
        self.transfer([Transfer(peer, values, sends) for peer in (others if sends else [source])]).wait()

    def transfer(self, transfers: Sequence[Transfer]) -> Transfers:
        """Starts transfers between pairs of ranks. Both sides name theirs in the same order."""
        return Transfers(self, transfers)

    def guarded(self, work: Callable[[], Result], what: str) -> Result:
        """``work()``; an error of the transport becomes one that names the ranks that are gone."""
        try:
            return work()
        except (RuntimeError, ValueError) as error:
            if not self._names_the_gone:
                raise
            gone = self._gone()
            who = f"ranks {gone} do not answer" if gone else "no rank could be named"
            raise RuntimeError(f"rank {dist.get_rank()}: {what} failed: {who} ({error})") from error

    def _gone(self) -> list[int]:
        """Global ranks of the group that do not answer. Ranks that are alive fail likewise, and then answer, too.

        They meet in the store of the default group, not on the group's own connections: what is left of those after a
        failed collective cannot be trusted.
        """
        store = distributed_c10d._get_default_store()
        own = dist.get_rank()
        deadline = time.monotonic() + _ANSWER_SECONDS
        try:
            store.set(_KEY.format(own), "alive")
        except RuntimeError:
            return self._keeper()
        gone = []
        for peer in [p for p in self.global_ranks if p != own]:
            left = max(0.1, deadline - time.monotonic())
            try:
                store.wait([_KEY.format(peer)], timedelta(seconds=left))
            except dist.DistNetworkError:
                return self._keeper()
            except RuntimeError:
                gone.append(peer)
        return gone

    def _keeper(self) -> list[int]:
        """The rank that the store went with: 0 keeps it, unless the launcher does."""
        launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return [] if launcher or 0 not in self.global_ranks else [0]

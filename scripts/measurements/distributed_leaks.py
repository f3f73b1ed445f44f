"""What many steps of the groups dispatcher leave behind on a rank: communicators, open files."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from megascale_omni.groups.channel import Channel
from megascale_omni.groups.dispatch import GroupDispatcher, GroupOptions

_TOKENS, _HIDDEN, _EXPERTS = 4, 8, 8


class LeakBench:
    """A dispatcher without experts: tokens go to their experts' ranks and back."""

    def __init__(self, rank: int, world: int) -> None:
        options = GroupOptions(move="tokens", discovery="gossip")
        self._dispatcher = GroupDispatcher(Channel(dist.group.WORLD), _EXPERTS, options=options)
        self._generator = torch.Generator().manual_seed(rank)

    def left(self, *, steps: int) -> int:
        """Process groups and open files that there are more of after ``steps`` forwards and backwards."""
        self._step()
        before = self._held()
        for _ in range(steps):
            self._step()
        return max(0, self._held() - before)

    def _step(self) -> None:
        x_Th = torch.rand(_TOKENS, _HIDDEN, generator=self._generator).requires_grad_()
        map_TE = torch.rand(_TOKENS, _EXPERTS, generator=self._generator) < 0.3
        trip = self._dispatcher.depart(x_Th, map_TE, torch.rand(_TOKENS, _EXPERTS, generator=self._generator))
        x_Nh, _, probs_N = trip.arrive()
        trip.back(x_Nh * probs_N.unsqueeze(1)).sum().backward()

    @staticmethod
    def _held() -> int:
        return len(dist.distributed_c10d._world.pg_map) + len(os.listdir("/proc/self/fd"))

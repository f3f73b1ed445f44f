"""Heat that several ranks share: counts are added up, so that all ranks decide alike.

[Note: agreed heat]
A rank sees the tokens of its own experts only, and of these only what its own data-parallel share sends. Where the
router is to know who is frozen, every rank must know it of every expert, and the same at the same step. So ranks add up
three integers an expert at every look: tokens, forwards with a token, and the step of the last one. All that follows is
a pure function of these sums, over all experts of a layer. No clock, and nothing that depends on where a page is, comes
into it: another budget decides the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from megascale_omni.config import HeatConfig
from megascale_omni.heat.states import Heat, Snapshot
from megascale_omni.heat.stored import Counts

TOKENS, FORWARDS, LAST = 0, 1, 2


class Exchange(Protocol):
    """How the ranks of a layer add their counts up."""

    num_experts: int
    """Of a layer, on all ranks."""
    first: int
    """Number of this rank's first expert among them."""

    def total(self, counts: np.ndarray) -> np.ndarray:
        """``[modules, local experts, 3]`` of every rank -> ``[modules, experts, 3]``, the same on all of them."""
        ...


class Alone:
    """One rank has all experts and sees all tokens."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts, self.first = num_experts, 0

    def total(self, counts: np.ndarray) -> np.ndarray:
        """See Exchange."""
        return counts


class GroupExchange:
    """Ranks of two groups: ``replicas`` have the same experts (None: nobody else), ``owners`` have the others.

    Every rank has as many local experts; rank ``r`` of ``owners`` has those from ``r * local_experts`` on.
    """

    def __init__(
        self,
        local_experts: int,
        *,
        owners: dist.ProcessGroup | None,
        replicas: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        size = 1 if owners is None else owners.size()
        self.num_experts = local_experts * size
        self.first = 0 if owners is None else dist.get_rank(owners) * local_experts
        self._local, self._owners, self._replicas, self._device = local_experts, owners, replicas, device

    def total(self, counts: np.ndarray) -> np.ndarray:
        """See Exchange."""
        mine = torch.from_numpy(np.ascontiguousarray(counts, dtype=np.int64)).to(self._device)
        if self._replicas is not None and self._replicas.size() > 1:
            sums, last = mine[..., :LAST].contiguous(), mine[..., LAST].contiguous()
            dist.all_reduce(sums, group=self._replicas)
            dist.all_reduce(last, op=dist.ReduceOp.MAX, group=self._replicas)
            mine = torch.cat([sums, last.unsqueeze(-1)], dim=-1)
        if self._owners is not None and self._owners.size() > 1:
            whole = mine.new_zeros(mine.shape[0], self.num_experts, mine.shape[2])
            whole[:, self.first : self.first + self._local] = mine
            dist.all_reduce(whole, group=self._owners)
            mine = whole
        return mine.cpu().numpy()


class AgreedHeat:
    """Parts of the window of all modules, as the ranks agreed on them, and the states of all experts."""

    def __init__(self, exchange: Exchange, config: HeatConfig) -> None:
        self.exchange = exchange
        self._parts = max(1, config.window_steps // config.refresh_steps)
        self._past: list[np.ndarray] = []  # [modules, experts, 2]
        self._last = np.zeros((0, 0), dtype=np.int64)
        self.states: list[np.ndarray] = []

    def end_part(self, counts: np.ndarray) -> None:
        """Adds this rank's ``[modules, local experts, 3]`` of the part that is over to the others'."""
        total = self.exchange.total(counts)
        if not self.states:
            self.states = [np.full(total.shape[1], Heat.WARM, dtype=np.int8) for _ in range(total.shape[0])]
        self._past.append(total[..., :LAST])
        del self._past[: -self._parts]
        self._last = total[..., LAST]

    def snapshot(self, module: int, *, done: int, flops: float, slices: int, travels: float) -> Snapshot:
        """What the policy sees of all experts of a module after ``done`` steps.

        ``flops``: of a token, forward and backward; ``slices``: pages of an expert; ``travels``: bytes a token travels.
        """
        sums = np.sum([part[module] for part in self._past], axis=0).astype(float)
        tokens, forwards = sums[:, TOKENS], sums[:, FORWARDS]
        metrics = np.stack([tokens * flops, 2.0 * slices * forwards, tokens * travels], axis=1)
        idle = np.maximum(0, done - self._last[module])
        # A gradient is pending of experts with tokens in the step that is over only, and these are not idle.
        return Snapshot(metrics, idle, self.states[module], pending=idle < 1)

    def restore(self, counts: Sequence[Counts], states: list[np.ndarray]) -> None:
        """Goes on from stored counts and states of all experts, module by module; the same on all ranks."""
        parts = min(len(of_module.parts) for of_module in counts)
        self._past = [
            np.stack([of_module.parts[len(of_module.parts) - parts + part, :, :LAST] for of_module in counts])
            for part in range(parts)
        ]
        self._last = np.stack([of_module.last for of_module in counts])
        self.states = states

    def local(self, values: np.ndarray, count: int) -> np.ndarray:
        """This rank's part of something an expert."""
        return values[self.exchange.first : self.exchange.first + count]


def spared(states: np.ndarray, chosen: np.ndarray, score: np.ndarray, *, awake: int) -> np.ndarray:
    """Of the experts ``chosen`` to be frozen, those that may be, so that ``awake`` are left to be routed to.

    Those with the lowest scores go first; among equals, the first.
    """
    most = int((states != Heat.FROZEN).sum()) - awake
    order: np.ndarray = chosen[np.argsort(score[chosen], kind="stable")]
    return np.sort(order[: max(0, most)])

"""Experts go to the ranks that a placement names, before anything but their weights exists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megascale_omni.experts.module import PagedExperts
from megascale_omni.groups.channel import Channel, Transfer
from megascale_omni.groups.pages import empty_weights, read_weights, write_weights
from megascale_omni.topology.placement import Slots


@dataclass(frozen=True)
class SlotCopy:
    """What was in slot ``source`` (rank, local expert; None: what was kept of the cycle) goes into ``target``."""

    source: tuple[int, int]
    target: tuple[int, int]
    kept: bool


def copies_of(slots: Slots) -> Iterator[SlotCopy]:
    """The copies that bring experts from stock's order into ``slots``, one cycle of the permutation after the other.

    What a cycle's first slot had is kept aside before it is overwritten, and goes to the last; so one expert at a time
    is out of its pages. A cycle's first copy says by its target what is to be kept.
    """
    local = len(slots[0])
    wanted = [expert for rank in slots for expert in rank]
    done = [False] * len(wanted)
    for start in range(len(wanted)):
        slot = start
        while not done[slot] and wanted[slot] != slot:
            done[slot] = True
            source, kept = wanted[slot], wanted[slot] == start
            yield SlotCopy(divmod(source, local), divmod(slot, local), kept)
            slot = source


@torch.no_grad()
def settle(experts: PagedExperts, channel: Channel, slots: Slots) -> None:
    """Moves weights so that local expert ``j`` becomes expert ``slots[rank][j]``; they are in stock's order before.

    A collective of the channel's group. Optimizer state must not exist yet.
    """
    kept: torch.Tensor | None = None
    cycle_begins = True
    for copy in copies_of(slots):
        (source, source_expert), (target, target_expert) = copy.source, copy.target
        if cycle_begins and target == channel.rank:
            kept = read_weights(experts, target_expert)
        cycle_begins = copy.kept
        if channel.rank not in (source, target):
            continue
        values: torch.Tensor | None = None
        if channel.rank == source:
            values = kept if copy.kept else read_weights(experts, source_expert)
            assert values is not None
        if source != target:
            moved = empty_weights(experts) if values is None else values
            peer = target if values is not None else source
            channel.transfer([Transfer(peer, moved, values is not None)]).wait()
            values = moved
        if channel.rank == target:
            assert values is not None
            write_weights(experts, target_expert, values)

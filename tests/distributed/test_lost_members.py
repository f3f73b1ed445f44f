"""A member that dies in mid-exchange, in every phase: all others end at once, with an error that names it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.experts.shards import PageShards, broadcast_owned
from megascale_omni.groups import channel as channel_module
from megascale_omni.groups.channel import Channel
from megascale_omni.groups.dispatch import GroupDispatcher, GroupOptions
from megascale_omni.optimizer.fetch import PageFetcher
from tests.distributed.group_side import LOCAL, GroupSide, random_map
from tests.unit.experts.paged import random_batch, small_experts

DEAD = 2

# What is under way when it dies: the work, and how often it has been through a guarded call by then.
PHASES: dict[str, tuple[str, int]] = {
    "discovery": ("pages", 0),
    "dispatch": ("tokens", 1),
    "pages on their way": ("pages", 6),
    "return": ("tokens", 4),
    "rows to spread pages": ("spread", 1),
    "gradients on their way": ("reduce", 1),
    "updated pages to copies": ("broadcast", 0),
    "pages on demand": ("fetch", 1),
}


class _Dies(Exception):
    pass


def _work(kind: str, channel: Channel, rank: int, world: int) -> Callable[[], object]:
    """One pass of what is tried, with everything made that needs no other rank."""
    if kind in ("tokens", "pages"):
        side = GroupSide(channel, GroupOptions(move=kind))  # type: ignore[arg-type]
        return lambda: side.step(random_map(12, LOCAL * world, seed=rank), seed=rank)
    if kind == "spread":
        spread = GroupDispatcher(Channel(None), 4, spread=channel)
        x_Th, map_TE = torch.ones(3, 24), random_map(3, 4, seed=rank)
        return lambda: spread.depart(x_Th, map_TE, torch.rand(map_TE.shape)).arrive()
    experts, shards = small_experts(num_experts=4), PageShards(rank, world, channel.group)
    if kind == "reduce":
        batch = random_batch((2, 2, 2, 2))
        experts(batch.x, batch.counts, batch.probs).backward(batch.grad_y)
        return lambda: ExpertGradients([experts]).finish(group=channel.group)
    if kind == "fetch":
        fetcher = PageFetcher(shards, stale=lambda *_: True, catch_up=lambda *_: None, fetched=lambda *_: None)
        every = [(expert, slice_) for expert in range(4) for slice_ in range(experts.layout.num_slices)]
        return lambda: fetcher.fetch(experts, every)
    ignored: Any = lambda name, part: part.zero_()  # noqa: E731
    return lambda: broadcast_owned(experts, shards, dtype=torch.float32, read=ignored, write=ignored)


def _dying(calls: int, *, dies: bool) -> Callable[..., object]:
    """``Channel.guarded``, where a rank that ``dies`` goes instead of making the call after ``calls`` of them."""
    made, guarded = 0, Channel.guarded

    def counted(self: Channel, call: Callable[[], object], what: str) -> object:
        nonlocal made
        if dies and made == calls:
            raise _Dies(what)
        made += 1
        return guarded(self, call, what)

    return counted


def lose_a_member(rank: int, world: int) -> dict[str, str]:
    """What this rank says in each phase; the dead one says what it did not do any more."""
    answers = {}
    for phase, (kind, calls) in PHASES.items():
        group = dist.new_group(list(range(world)))
        channel = Channel(group)
        work = _work(kind, channel, rank, world)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(channel_module, "_ANSWER_SECONDS", 1.0)
            patch.setattr(Channel, "guarded", _dying(calls, dies=rank == DEAD))
            try:
                work()
                answers[phase] = "nothing happened"
            except (RuntimeError, _Dies) as error:
                answers[phase] = str(error)
        # Its connections end here as those of a dead process do; survivors close theirs as they end.
        del work
        channel.group = None
        dist.destroy_process_group(group)
        del group, channel
        gc.collect()
    return answers


def test_a_member_that_is_gone_is_named_by_all_others_whatever_they_do(pools):
    answers = pools[4].run(lose_a_member, timeout_seconds=80.0)
    pools[4].stop()
    for phase in PHASES:
        for rank in (0, 1, 3):
            assert f"rank {rank}: " in answers[rank][phase], (phase, answers[rank][phase])
            assert f"ranks [{DEAD}] do not answer" in answers[rank][phase], (phase, answers[rank][phase])
    assert "counts" in answers[DEAD]["discovery"]
    assert "rows of tokens" in answers[DEAD]["dispatch"]
    assert "send" in answers[DEAD]["pages on their way"]

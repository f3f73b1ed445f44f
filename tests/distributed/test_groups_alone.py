"""The dispatcher without a framework: two hosts, ranks that have no share, nothing that is left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megascale_omni.experts.workspace import Workspace
from megascale_omni.groups.channel import Channel
from megascale_omni.groups.dispatch import GroupOptions
from megascale_omni.groups.pages import TravellingPages
from megascale_omni.groups.plan import PAGE_BATCH, Plan
from tests.distributed.group_side import LOCAL, GroupSide, gradient_of, random_map
from tests.distributed.two_hosts import LINK_MBIT
from tests.unit.experts.paged import drop_gradients, gradients

ROOT = Path(__file__).resolve().parents[2]

# --- two hosts --------------------------------------------------------------------------------------------------------


def own_namespace() -> list[str] | None:
    """The command that runs another in a network namespace of its own; None where that cannot be."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip", "tc"))):
        return None
    probe = "ip link add v0 type veth peer name v1 && tc qdisc add dev v0 root tbf rate 1mbit burst 64kb latency 9ms"
    for command in (["unshare", "--user", "--map-root-user", "--net"], ["unshare", "--net"]):
        if not subprocess.run([*command, "sh", "-c", probe], capture_output=True, timeout=20).returncode:
            return command
    return None


def test_two_hosts_with_a_slow_link_between_agree_and_measure_it(tmp_path):
    command = own_namespace()
    if command is None:
        pytest.skip("network namespaces with a shaped link cannot be made here")
    done = subprocess.run(
        [*command, sys.executable, "-m", "tests.distributed.two_hosts", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    assert len(answers) == 4
    for answer in answers:
        assert answer["topology"] == answers[0]["topology"]
        assert answer["missing"] == []
        assert max(answer["worst"].values()) < 1e-4
    device, cluster = answers[0]["topology"]["levels"]
    assert [node["ranks"] for node in answers[0]["topology"]["nodes"]] == [2, 2]
    assert cluster["bandwidth"] <= 1.25 * LINK_MBIT * 1e6 / 8, "what the link lets through"
    assert device["bandwidth"] > cluster["bandwidth"]


# --- who has no share -------------------------------------------------------------------------------------------------


def leave_while_others_exchange(rank: int, world: int) -> bool:
    """Ranks 0 and 1 exchange pages only after rank 3, whose tokens chose its own experts, has been through."""
    side = GroupSide(Channel(dist.group.WORLD), GroupOptions(move="pages"))
    map_TE = torch.zeros(3, LOCAL * world, dtype=torch.bool)
    map_TE[:, rank * LOCAL] = True
    if rank < 2:
        map_TE[:, (1 - rank) * LOCAL] = True
    store = dist.distributed_c10d._get_default_store()
    start = TravellingPages.start_weights
    waited = []

    def late(pages, batch):
        store.wait(["rank 3 is through"], timedelta(seconds=30))
        waited.append(batch)
        return start(pages, batch)

    if rank < 2:
        TravellingPages.start_weights = late  # type: ignore[method-assign]
    try:
        x_Th = torch.randn(3, 24).requires_grad_()
        trip = side.dispatcher.depart(x_Th, map_TE, torch.rand(map_TE.shape))
        x_Nh, counts, probs_N = trip.arrive()
        trip.back(side.local(x_Nh, counts, probs_N))
        if rank == 3:
            store.set("rank 3 is through", "yes")
    finally:
        TravellingPages.start_weights = start  # type: ignore[method-assign]
    return bool(waited) == (rank < 2)


def test_ranks_without_a_share_do_not_wait_for_those_that_exchange_pages(pools):
    assert pools[4].run(leave_while_others_exchange) == [True] * 4


# --- experts whose pages travel ---------------------------------------------------------------------------------------


def round_gradients(rank: int, world: int) -> tuple[float, float, list[int]]:
    """bf16 weight gradients of all ranks' tokens, in pages mode and where each rank rounds its own part.

    Shares of elements that differ from one product of all tokens, rounded once; tokens of this rank's experts that
    whoever keeps heat was not told of.
    """
    side = GroupSide(Channel(dist.group.WORLD), GroupOptions(move="pages"), dtype=torch.bfloat16)
    told = np.zeros(LOCAL, dtype=np.int64)
    routed = side.local.manager.routed
    side.local.manager.routed = lambda module, counts: told.__iadd__(counts)  # type: ignore[method-assign, assignment]
    x_pTh, map_pTE, probs_pTE = [], [], []
    for p in range(world):
        generator = torch.Generator().manual_seed(p)
        x_pTh.append(torch.randn(30, 24, generator=generator).bfloat16())
        map_pTE.append(random_map(30, LOCAL * world, seed=p))
        probs_pTE.append(torch.rand(30, LOCAL * world, generator=generator))
    side.dispatched(x_pTh[rank].requires_grad_(), map_pTE[rank], probs_pTE[rank].requires_grad_())
    ours = gradients(side.local)
    weights_Th = gradient_of(x_pTh[rank].detach()).repeat(world, 1)
    expert_N, token_N = torch.cat(map_pTE).t().nonzero(as_tuple=True)
    x_Nh, probs_N = (
        torch.cat(x_pTh).detach()[token_N].requires_grad_(),
        torch.cat(probs_pTE).detach()[token_N, expert_N],
    )
    side.whole(x_Nh, torch.cat(map_pTE).sum(0).tolist(), probs_N).backward(weights_Th[token_N])
    once = gradients(side.whole)
    drop_gradients(side.whole)
    side.alone(x_pTh[rank].detach().requires_grad_(), map_pTE[rank], probs_pTE[rank].detach().requires_grad_())
    by_part = gradients(side.whole)
    for name in sorted(by_part):
        dist.all_reduce(by_part[name])

    def differing(found: dict[str, torch.Tensor]) -> float:
        pairs = [(found[name], once[side.whole_name(name)]) for name in ours]
        return sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)

    side.local.manager.routed = routed  # type: ignore[method-assign]
    parts = {name: by_part[side.whole_name(name)] for name in ours}
    chosen_E = torch.cat(map_pTE).sum(0)[rank * LOCAL : (rank + 1) * LOCAL]
    return differing(ours), differing(parts), (chosen_E.numpy() - told).tolist()


def test_gradients_of_travelling_experts_are_rounded_once_and_their_tokens_counted(pools):
    for ours, by_part, uncounted in pools[2].run(round_gradients):
        assert ours < 0.02
        assert by_part > 0.2, "there is something to tell them apart by"
        assert uncounted == [0] * LOCAL


def note_batches(rank: int, world: int) -> list[list[str]]:
    """What happens to the two batches of eight experts that all ranks choose, in a forward and in its backward."""
    side = GroupSide(Channel(dist.group.WORLD), GroupOptions(move="pages"))
    map_TE = torch.ones(3, LOCAL * world, dtype=torch.bool)
    x_Th, probs_TE = torch.randn(3, 24).requires_grad_(), torch.rand(map_TE.shape).requires_grad_()
    events: list[str] = []

    def noting(name: str, original: Any) -> Any:
        def noted(*given: Any) -> Any:
            events.append(name)
            return original(*given)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("start_weights", "welcome", "start_gradients", "take_home", "farewell"):
            patch.setattr(TravellingPages, name, noting(name, getattr(TravellingPages, name)))
        trip = side.dispatcher.depart(x_Th, map_TE, probs_TE)
        x_Nh, counts, probs_N = trip.arrive()
        output = trip.back(side.local(x_Nh, counts, probs_N))
        forward = events.copy()
        output.sum().backward()
    return [forward, events[len(forward) :]]


def test_a_batch_is_on_its_way_while_the_one_before_it_is_computed(pools):
    """Products are made between welcome and farewell."""
    computed = ["welcome", "start_weights", "farewell", "welcome", "farewell"]
    for forward, backward in pools[4].run(note_batches):
        assert forward == ["start_weights", *computed]
        assert backward == [
            *("start_weights", "welcome", "start_weights", "start_gradients", "farewell"),
            *("welcome", "take_home", "start_gradients", "farewell", "take_home"),
        ]


def home_in_bf16(rank: int, world: int) -> tuple[list[tuple[float, float]], list[set[torch.dtype]]]:
    """Of each gradient of this rank's experts: how far it is from what it is with fp32 on the wire, and its largest
    element; and what was lent for gradients on their way, with fp32 and with bf16 on the wire.
    """
    found, lent = [], []
    for wire in ("fp32", "bf16"):
        side = GroupSide(Channel(dist.group.WORLD), GroupOptions(move="pages", grad_wire=wire))  # type: ignore[arg-type]
        start, dtypes = Channel.transfer, set[torch.dtype]()

        def noted(channel, transfers, start=start, dtypes=dtypes):
            dtypes.update(transfer.tensor.dtype for transfer in transfers)
            return start(channel, transfers)

        generator = torch.Generator().manual_seed(rank)
        x, probs = (torch.randn(6, n, generator=generator).requires_grad_() for n in (24, LOCAL * world))
        forward = side.dispatcher.pages.start_gradients  # type: ignore[union-attr]

        def home(batch, forward=forward, noted=noted):
            with mock.patch.object(Channel, "transfer", noted):
                return forward(batch)

        with mock.patch.object(side.dispatcher.pages, "start_gradients", home):
            side.dispatched(x, torch.ones(6, LOCAL * world, dtype=torch.bool), probs)
        found.append(gradients(side.local))
        lent.append(dtypes)
    pairs = [(found[1][name], expected) for name, expected in found[0].items()]
    return [(float((one - other).abs().max()), float(other.abs().max())) for one, other in pairs], lent


def test_gradients_of_pages_that_travelled_may_come_home_in_bf16(pools):
    for differences, lent in pools[2].run(home_in_bf16):
        assert lent == [{torch.float32}, {torch.bfloat16}]
        assert len(differences) == 4
        for difference, largest in differences:
            assert 0 < difference <= 2**-8 * largest


def repeat_pages(rank: int, world: int) -> tuple[int, int, int, int, int]:
    """Buffers made in the first step and in three more of the same and other groups; experts' buffers kept; look-ups
    of groups found and not found in the last step, whose groups were there before.
    """
    side = GroupSide(Channel(dist.group.WORLD), GroupOptions(move="pages"))
    pages, kept = side.dispatcher.pages, side.dispatcher.house._buffers
    assert pages is not None
    made: list[int] = []
    new = Workspace._new

    def counted(workspace: Workspace, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if workspace in kept.values():
            made.append(numel)
        return new(workspace, numel, dtype)

    everyone = torch.ones(6, LOCAL * world, dtype=torch.bool)
    maps = [everyone, random_map(6, LOCAL * world, seed=rank), random_map(9, LOCAL * world, seed=rank + 7), everyone]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "_new", counted)
        side.step(maps[0], seed=rank)
        first = len(made)
        for step, map_TE in enumerate(maps[1:]):
            cache = side.dispatcher.cache
            before = cache.hits, cache.misses
            assert max(side.step(map_TE, seed=10 * step + rank).values()) < 1e-4
    (buffers,) = kept.values()
    return (
        first,
        len(made) - first,
        buffers.nbytes // (4 * pages.expert_numel),
        cache.hits - before[0],
        cache.misses - before[1],
    )


def test_groups_that_recur_find_their_plan_and_no_buffer_is_made_for_them(pools):
    for first, later, kept, hits, misses in pools[4].run(repeat_pages):
        assert 0 < first == kept <= 2 * PAGE_BATCH * 5, "weights of two batches, and four ranks' gradients of each"
        assert later == 0
        assert (hits, misses) == (4 * LOCAL, 0)


# --- what is left behind ----------------------------------------------------------------------------------------------


def dispatch_often(rank: int, world: int, *, steps: int) -> tuple[int, int, int, bool]:
    """Process groups and open files before and after, entries of the group cache, and whether results are right."""
    channel = Channel(dist.group.WORLD)
    side = GroupSide(channel, GroupOptions(move="auto", discovery="gossip", cache=2))
    right = max(side.step(random_map(4, LOCAL * world, seed=rank), seed=rank).values()) < 1e-4

    def left() -> tuple[int, int]:
        return len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/fd"))

    before = left()
    for step in range(steps):
        x_Th = torch.zeros(2, 24)
        trip = side.dispatcher.depart(x_Th, random_map(2, LOCAL * world, seed=world * step + rank), torch.rand(2, 4))
        x_Nh, counts, probs_N = trip.arrive()
        with torch.no_grad():
            trip.back(side.local(x_Nh, counts, probs_N))
    after = left()
    return after[0] - before[0], after[1] - before[1], len(side.dispatcher.cache), right


def test_no_communicator_is_made_and_no_file_stays_open(pools):
    for groups, files, entries, right in pools[2].run(dispatch_often, steps=150, timeout_seconds=60.0):
        assert (groups, files) == (0, 0)
        assert 0 < entries <= 2
        assert right


def exchange_in_batches_of_one(rank: int, world: int) -> tuple[dict[str, float], list[int]]:
    """Rank 0 skips the batch between two in which it and rank 2 own an expert each that the other one computes."""
    side = GroupSide(Channel(dist.group.WORLD), GroupOptions(move="pages"))
    map_TE = torch.zeros(3, LOCAL * world, dtype=torch.bool)
    for expert in {0: [2 * LOCAL], 2: [0, LOCAL]}.get(rank, []):
        map_TE[:, expert] = True
    involved = []
    start = TravellingPages.start_gradients

    def noted(pages, batch):
        involved.append(batch[0].expert)
        return start(pages, batch)

    with (
        mock.patch.object(Plan, "batches", lambda plan: tuple((move,) for move in plan.moves)),
        mock.patch.object(TravellingPages, "start_gradients", noted),
    ):
        return side.step(map_TE, seed=rank), involved


def test_two_ranks_meet_each_others_pages_in_one_order_whatever_others_exchange_between(pools):
    found = pools[4].run(exchange_in_batches_of_one)
    assert [involved for _, involved in found][:3] == [[0, 2 * LOCAL], [LOCAL], [0, LOCAL, 2 * LOCAL]]
    for differences, _ in found:
        assert max(differences.values()) < 1e-4

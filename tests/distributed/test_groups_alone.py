"""The dispatcher without a framework: two hosts, ranks that have no share, nothing that is left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megascale_omni.groups.channel import Channel
from megascale_omni.groups.dispatch import GroupOptions
from megascale_omni.groups.pages import TravellingPages
from tests.distributed.group_side import LOCAL, GroupSide, random_map
from tests.distributed.two_hosts import LINK_MBIT

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

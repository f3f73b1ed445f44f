"""Ranks end together, and one of them says why: real processes, real signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from scripts.moe_trainer.peers import describe_lost, still

ROOT = Path(__file__).resolve().parents[3]
RANKS = """
import argparse, os, signal, sys
from datetime import timedelta
import torch
from scripts.moe_trainer.distributed import start
from scripts.moe_trainer.main import _failed
from megascale_omni.paging.disk import PageIoError


def run(rank, struck, ready):
    os.environ["RANK"] = str(rank)
    seconds = 1 if struck == "late" else 4
    peers = start(argparse.Namespace(distributed_backend="gloo", distributed_timeout_minutes=seconds / 60))
    pairs = [torch.distributed.new_group(pair, timeout=timedelta(seconds=seconds)) for pair in ([0, 1], [1, 2])]
    if struck == "late" and rank == 1:  # looks at the others' numbers when rank 0 has said its word and ended
        beats = peers._beats

        def late():
            while peers._word is None:
                peers._over.wait(0.01)
            while True:
                beats()  # until the store is gone
                peers._over.wait(0.01)

        peers._beats = late
    os.write(ready, b".")
    if struck == "mistake":  # rank 0, which keeps the store, meets it first and ends
        while rank and peers._word is None:
            peers._over.wait(0.01)
        if peers.tell(2, "the same on every rank"):
            print(f"pretrain_moe.py: told by rank {rank}", file=sys.stderr, flush=True)
        peers.part()
        return 2
    try:
        while True:
            if struck == "page" and rank == 2:
                raise PageIoError(5, "reading the weight page of layer 3 failed: Input/output error")
            for pair in pairs:  # rank 0 never talks to rank 2
                torch.distributed.all_reduce(torch.ones(1), group=pair)
    except Exception as error:
        status = _failed(error, peers)
        peers.part()  # as the trainer does
        return status


struck = sys.argv[1]
here, ready = os.pipe()
ranks = []
for rank in range(3):
    ranks.append(os.fork())
    if ranks[-1] == 0:
        status = 99
        try:
            status = run(rank, struck, ready)
        finally:
            os._exit(status)
os.close(ready)  # so that ranks that end too early are not waited for
for _ in range(3):
    os.read(here, 1)
if struck.startswith("SIG") or struck == "late":
    os.kill(ranks[2], signal.SIGKILL if struck == "late" else getattr(signal, struck))
statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks[:2]]
if struck == "SIGSTOP":
    os.kill(ranks[2], signal.SIGKILL)
print([*statuses, os.waitstatus_to_exitcode(os.waitpid(ranks[2], 0)[1])])
"""


@pytest.mark.parametrize(
    ("struck", "statuses", "message"),
    [
        ("SIGKILL", [1, 1, -9], "error: lost rank 2 of 3: killed, stopped, or out of reach; the other ranks end"),
        ("SIGSTOP", [1, 1, -9], "error: lost rank 2 of 3: killed, stopped, or out of reach; the other ranks end"),
        ("SIGTERM", [1, 1, 143], "error: rank 2 of 3: told to end (SIGTERM); the other ranks end too"),
        ("page", [1, 1, 1], "error on rank 2: reading the weight page of layer 3 failed: Input/output error"),
        ("mistake", [2, 2, 2], "told by rank 0"),
        ("late", [1, 1, -9], "error: lost rank 2 of 3: killed, stopped, or out of reach; the other ranks end"),
    ],
    ids=["killed", "stopped", "told", "page", "mistake", "late"],
)
def test_every_rank_ends_and_one_says_which_was_struck(struck: str, statuses: list[int], message: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = subprocess.Popen(
        [sys.executable, "-c", RANKS, struck],
        cwd=ROOT,
        env={**os.environ, **world, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = ranks.communicate(timeout=90)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
    said = [line for line in errors.splitlines() if line.startswith("pretrain_moe.py: ")]
    assert said == [f"pretrain_moe.py: {message}"], errors
    assert "Traceback" not in errors
    assert out == f"{statuses}\n"


def test_numbers_that_stand_still_are_lost_ranks() -> None:
    assert still([1, 5, 7], [2, 5, 7]) == [1, 2]
    assert describe_lost([1, 2], [0], 3).startswith("lost ranks 1, 2 of 3: ")
    assert describe_lost([], [0], 3).startswith("rank 0 of 3: told to end")
    assert describe_lost([], [], 3) == ""

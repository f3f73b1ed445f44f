"""What the ranks of the tests of `scripts.measuring.processes` do; imports nothing but torch."""

import os
import threading

import torch
from torch import distributed

from scripts.comparison.collectives import CollectiveCounter


class Ranks:
    """A target for `Workers`: one object a rank."""

    def __init__(self, rank: int, world: int, *, base: int) -> None:
        if base < 0:
            raise ValueError(f"base {base} must not be negative")
        self._rank, self._world, self._base = rank, world, base

    def total(self, extra: int) -> int:
        """The sum over ranks of rank + base + extra, through a collective."""
        value = torch.tensor(self._rank + self._base + extra)
        distributed.all_reduce(value)
        return int(value)

    def surroundings(self) -> dict[str, object]:
        """Where the rank runs."""
        return {
            "threads": torch.get_num_threads(),
            "rank": os.environ["RANK"],
            "omp": os.environ["OMP_NUM_THREADS"],
            "pid": os.getpid(),
        }

    def fail_on(self, rank: int) -> None:
        """One rank raises, the others wait for it in a collective."""
        if self._rank == rank:
            raise RuntimeError(f"rank {rank} cannot go on")
        distributed.barrier()

    def die_on(self, rank: int) -> None:
        """One rank's process ends, the others wait for it."""
        if self._rank == rank:
            print("the last words of a rank", flush=True)
            os._exit(7)
        distributed.barrier()

    def be_silent(self) -> None:
        """Never answer."""
        threading.Event().wait()

    def sent_bytes(self) -> dict[str, int]:
        """Bytes that this rank sent in each kind of collective, as the counter saw them."""
        counter = CollectiveCounter()
        counter.install()
        try:
            return {name: _counted(counter, call) for name, call in _collectives(self._rank, self._world).items()}
        finally:
            counter.remove()


def _counted(counter, call):  # type: ignore[no-untyped-def]
    before = counter.sent_bytes
    call()
    return counter.sent_bytes - before


def _collectives(rank, world):  # type: ignore[no-untyped-def]
    """Collectives on 2 ranks, each of 12 floats (48 bytes) of input a rank unless its name says otherwise."""
    full, half, double = torch.zeros(12), torch.zeros(6), torch.zeros(24)
    other = 1 - rank
    uneven = [9, 3] if rank == 0 else [5, 7]  # to rank 0, to rank 1
    received = [9, 5] if rank == 0 else [3, 7]

    def exchange() -> None:
        operations = [
            distributed.P2POp(distributed.isend, full, other),
            distributed.P2POp(distributed.irecv, half.new_empty(12), other),
        ]
        for work in distributed.batch_isend_irecv(operations):
            work.wait()

    def send_and_receive() -> None:
        if rank == 0:
            distributed.send(full, 1)
        else:
            distributed.recv(full, 0)

    return {
        "all_reduce": lambda: distributed.all_reduce(full),
        "all_gather": lambda: distributed.all_gather([torch.zeros(12), torch.zeros(12)], full),
        "all_gather_into_tensor": lambda: distributed.all_gather_into_tensor(double, full),
        "reduce_scatter_tensor": lambda: distributed.reduce_scatter_tensor(half, full),
        "all_to_all_single": lambda: distributed.all_to_all_single(torch.zeros(12), full),
        "uneven all_to_all_single": lambda: distributed.all_to_all_single(
            torch.zeros(sum(received)), torch.zeros(12), received, uneven
        ),
        "broadcast from 0": lambda: distributed.broadcast(full, 0),
        "broadcast from 1": lambda: distributed.broadcast(full, src=1),
        "reduce to 1": lambda: distributed.reduce(full, 1),
        "batched exchange": exchange,
        "send to 1": send_and_receive,
        "barrier": distributed.barrier,
    }

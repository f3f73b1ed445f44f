"""One name for one start of the ranks, agreed on over a store that outlives them.

A launcher that starts ranks anew (torchrun's elastic agent) keeps its store, and in it the addresses of the ranks that
ended. Keys of a start must therefore be told from those of the start before. The launcher's own restart count does not
serve: every node counts alone, and a node that saw a peer leave before its own rank failed counts one less, so that
ranks of one start would wait for each other under different names.
"""

import time
import uuid
from datetime import timedelta

import torch

_PAUSE_SECONDS = 0.02


def agreed_start(store: torch.distributed.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name that all ranks of this start return, and that no start before had.

    Rank 0 makes it and answers whoever greets it; a greeting that a rank left behind when it ended is answered too, and
    its successor's greeting after it. Rank 0 returns when a rank of every number has taken the name. Raises
    `torch.distributed.DistStoreError` when `timeout` has passed before that.
    """
    if rank == 0:
        return _host(store, world_size, timeout)
    greeting = uuid.uuid4().hex
    store.set(f"start/greeting/{rank}", greeting)
    store.wait([f"start/answer/{greeting}"], timeout)
    name = store.get(f"start/answer/{greeting}").decode()
    store.set(f"start/{name}/{rank}", "")
    return name


def _host(store: torch.distributed.Store, world_size: int, timeout: timedelta) -> str:
    name = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    answered: dict[int, str] = {}
    waiting = set(range(1, world_size))
    while True:
        for rank in sorted(waiting):
            if store.check([f"start/{name}/{rank}"]):
                waiting.discard(rank)
            elif store.check([f"start/greeting/{rank}"]):
                greeting = store.get(f"start/greeting/{rank}").decode()
                if answered.get(rank) != greeting:
                    store.set(f"start/answer/{greeting}", name)
                    answered[rank] = greeting
        if not waiting:
            return name
        if time.monotonic() > deadline:
            raise torch.distributed.DistStoreError(
                f"after {timeout.total_seconds():g} s rank 0 has not heard from ranks {sorted(waiting)}: "
                "did they start, and can they reach MASTER_ADDR:MASTER_PORT?"
            )
        time.sleep(_PAUSE_SECONDS)

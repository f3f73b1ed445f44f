"""One rank of a pool (see pool.py): reads jobs from a pipe, runs them, answers; ends when the pipe does."""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

SEED = 1234


class Job(NamedTuple):
    """``function``: ``"module:name"``; ``number``: of this run in its pool, names the rendezvous."""

    function: str
    arguments: dict[str, object]
    number: int
    timeout_seconds: float


class Failure(NamedTuple):
    """What a rank raised; text, because not every exception survives a pickle."""

    type_name: str
    text: str
    traceback: str


class Answer(NamedTuple):
    """A result, or a ``Failure``."""

    value: object


def stack_path(folder: str, rank: int) -> Path:
    """Where a rank writes its stack shortly before its time is over."""
    return Path(folder) / f"rank{rank}.stack"


def main(connection: Connection, rank: int, world: int, folder: str) -> None:
    """Serve jobs until the other end of ``connection`` closes."""
    threading.Thread(target=_end_with_session, args=(folder,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test session, which stops the pool
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # nothing here listens beyond this machine
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what was loaded before the ranks were forked stays; collections need not look through it each time
    with stack_path(folder, rank).open("w") as stacks:
        while True:
            try:
                job: Job = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                return
            faulthandler.dump_traceback_later(0.9 * job.timeout_seconds, file=stacks)
            message = _answer(job, rank, world, folder)
            faulthandler.cancel_dump_traceback_later()
            connection.send_bytes(message)


def _end_with_session(folder: str) -> None:
    """Wait until the test session is gone. A rank that is stuck in a collective does not see its pipe close."""
    session = multiprocessing.parent_process()
    assert session is not None
    session.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _answer(job: Job, rank: int, world: int, folder: str) -> bytes:
    """The pickled answer to one job; whatever goes wrong becomes a ``Failure``."""
    try:
        return pickle.dumps(Answer(_run(job, rank, world, folder)))
    except BaseException as error:
        return pickle.dumps(Answer(Failure(type(error).__name__, str(error), traceback.format_exc())))


def _run(job: Job, rank: int, world: int, folder: str) -> object:
    import numpy
    import torch
    from torch import distributed

    module, _, name = job.function.partition(":")
    function = getattr(importlib.import_module(module), name)
    torch.manual_seed(SEED)
    numpy.random.seed(SEED)
    random.seed(SEED)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous{job.number}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=job.timeout_seconds),
    )
    try:
        distributed.barrier()  # a rank that fails at once must not break the others' connecting
        return function(rank, world, **job.arguments)
    finally:
        _forget_model()
        distributed.destroy_process_group()
        gc.collect()  # what still refers to a group keeps three threads of it alive


def _forget_model() -> None:
    """What Megatron keeps of a model in its modules: groups end with the default group, losses of layers with a model.

    Who comes next must not find names taken, nor sums for another number of layers.
    """
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()
    moe_utils = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    if moe_utils is not None:
        moe_utils.get_moe_layer_wise_logging_tracker().clear()

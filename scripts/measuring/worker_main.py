"""One rank of `Workers` (see processes.py): `python -m scripts.measuring.worker_main FD PARENT`."""

import ctypes
import importlib
import os
import pickle
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection

from scripts.measuring.processes import Call, Failed, Reply, Start

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Serve calls until the other end of the pipe closes."""
    _end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    connection = Connection(descriptor)
    served: object | None = None
    while True:
        try:
            message = pickle.loads(connection.recv_bytes())  # from the process that started this one
        except (EOFError, ConnectionResetError):
            os._exit(0)  # nobody is there to clean up for, and other ranks may be gone
        try:
            if isinstance(message, Start):
                served = _make(message)
                answer: Reply | Failed = Reply(None)
            else:
                assert isinstance(message, Call)
                answer = Reply(getattr(served, message.method)(**message.arguments))
            content = pickle.dumps(answer)
        except Exception as error:
            failed = Failed(type(error).__name__, str(error), traceback.format_exc(), isinstance(error, ValueError))
            content = pickle.dumps(failed)
        connection.send_bytes(content)


def _end_with(parent: int) -> None:
    """The kernel ends this process when its parent ends, even where it is stuck in a collective."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _make(start: Start) -> object:
    import torch

    torch.set_num_threads(start.threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(start.rank % torch.cuda.device_count())
    torch.distributed.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"file://{start.rendezvous}",
        rank=start.rank,
        world_size=start.world,
        timeout=timedelta(seconds=start.timeout_seconds),
    )
    module, _, name = start.target.partition(":")
    return getattr(importlib.import_module(module), name)(start.rank, start.world, **start.arguments)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

"""The command line: parse, train, and end every rank with the same status."""

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn

from .errors import LocalUsageError, UsageError
from .peers import Peers, is_transport_error

FAILED, MISUSED, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 2 for a mistake in the settings, 130 when interrupted.

    A mistake, and the loss of a rank, are printed once. Another error is printed by the rank it struck first, and ends
    all processes at once with status 1: a normal exit would wait for messages that other ranks no longer send.
    """
    first = os.environ.get("RANK", "0") == "0"
    _quieten(first)
    peers: Peers | None = None
    try:
        from .arguments import parse_args

        args = parse_args(argv)
        from .distributed import leave, start
        from .loop import train

        peers = start(args)
        train(args)
        leave(peers)
    except LocalUsageError as error:
        if peers is None:
            _report(str(error))
        elif peers.tell(MISUSED, str(error)):
            _report(f"{error} (on rank {peers.rank})")
        _exit(MISUSED, peers)
    except UsageError as error:
        if first:
            _report(str(error))
        return MISUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        _exit(_failed(error, peers), peers)
    return 0


def _failed(error: Exception, peers: Peers | None) -> int:
    """Say what there is to say about an error that is no mistake of the user's. Returns the exit status."""
    if peers is None:
        if is_transport_error(error):
            _report(f"the ranks did not meet: {str(error).splitlines()[0]}")
        else:
            _print_own(error, where="")
        return FAILED
    where = f" on rank {peers.rank}"
    if not is_transport_error(error):
        summary = f"{type(error).__name__}: {error}"
        if peers.tell(FAILED, summary):
            _print_own(error, where=where)
        else:
            _report(summary.splitlines()[0], where=where)
        return FAILED
    word, mine = peers.judge()
    if mine and word.message:
        _report(word.message)
    elif mine:  # a rank was only late, or the network is to blame
        _print_own(error, where=where)
        _report("all ranks are there, and did not meet in time: see --distributed-timeout-minutes", where=where)
    return word.status


def _print_own(error: Exception, *, where: str) -> None:
    """A page's file that fails is told in a line; of anything else the place matters."""
    from megascale_omni.paging.disk import PageIoError

    if isinstance(error, PageIoError):
        _report(str(error.strerror or error), where=where)
    else:
        traceback.print_exception(error)


def _report(message: str, *, where: str = "") -> None:
    print(f"pretrain_moe.py: error{where}: {message}", file=sys.stderr, flush=True)


def _exit(status: int, peers: Peers | None) -> NoReturn:
    if peers is not None:
        peers.part()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _quieten(first: bool) -> None:
    """Leave out what stock says on every start about packages that are not needed here."""
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # of what stock calls
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"`?torch\.distributed\.")
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)
    if not first:
        warnings.simplefilter("ignore")

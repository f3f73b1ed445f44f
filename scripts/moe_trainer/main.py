"""The command line: parse, train, and end every rank with the same status."""

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence

from .errors import LocalUsageError, UsageError

FAILED, MISUSED, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 2 for a mistake in the settings, 130 when interrupted.

    A mistake is printed once. Any other error is printed by the rank it struck, and ends the process at once with
    status 1: a normal exit would wait for messages that other ranks no longer send.
    """
    first = os.environ.get("RANK", "0") == "0"
    _quieten(first)
    try:
        from .arguments import parse_args

        args = parse_args(argv)
        from .distributed import leave
        from .loop import train

        train(args)
        leave()
    except LocalUsageError as error:
        _report_once(error)
        sys.stderr.flush()
        os._exit(MISUSED)
    except UsageError as error:
        if first:
            _report(error)
        return MISUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILED)
    return 0


def _report(error: UsageError) -> None:
    print(f"pretrain_moe.py: error: {error}", file=sys.stderr, flush=True)


def _report_once(error: LocalUsageError) -> None:
    """Report unless another rank did; which one is first is settled by the ranks' store, without waiting for any."""
    import torch

    store = torch.distributed.distributed_c10d._get_default_store()
    try:
        first = store.add("moe_trainer/reported", 1) == 1
    except RuntimeError:  # the rank that keeps the store has ended: it met an error too, and told it
        return
    if first:
        _report(error)


def _quieten(first: bool) -> None:
    """Leave out what stock says on every start about packages that are not needed here."""
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # of what stock calls
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"`?torch\.distributed\.")
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)
    if not first:
        warnings.simplefilter("ignore")

"""DeepSpeed in a rank that serves many jobs: what it keeps of the groups of old jobs must go."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


def prepare() -> None:
    """To be called before anything imports DeepSpeed: CPU back end, no compiled operators."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_RANK", "0")
    from deepspeed_ext.cpu import without_compiled_ops

    without_compiled_ops()


@contextmanager
def fresh_deepspeed() -> Iterator[None]:
    """DeepSpeed on the default group of this job; forgets its groups at the end."""
    prepare()
    import deepspeed.comm.comm as comm
    from deepspeed.utils import groups, logger

    logger.setLevel("ERROR")
    _forget(comm, groups)
    try:
        yield
    finally:
        _forget(comm, groups)


def _forget(comm: object, groups: object) -> None:
    comm.cdb = None  # type: ignore[attr-defined]
    groups._release_process_group_references(group=None)  # type: ignore[attr-defined]

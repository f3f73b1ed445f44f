"""Stock's format is written without a second model in memory, wherever its tensors lie, and reads as it was.

Once by the trainer's writer, and once by stock's own, which forks, as it is hooked under Megatron-LM's scripts.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import process
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megascale_omni.checkpoint.scratch import DenseScratch
from megascale_omni.config import MegaScaleConfig
from tests.distributed.pool import Pools

WIDE, PARTS = 1 << 20, 24  # 24 tensors of 4 MiB, each written as two halves


@contextmanager
def hooked_writer(release: Callable[[], None]) -> Iterator[None]:
    """Stock's writer as it is in a run of Megatron-LM's scripts with `--megascale`."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from megatron_ext.megatron_lm import session, writing

    writer = filesystem_async.FileSystemWriterAsync
    found = {name: vars(writer)[name] for name in ("prepare_write_data", "write_preloaded_data")}
    running = session.Session(MegaScaleConfig())
    with (
        patch.object(writing, "_release", release),
        patch.object(session, "_sessions", [running]),
        patch.object(filesystem_async, "_results_queue", queue.Queue()),  # stock's is a process of its own
        patch.dict(vars(process.current_process())["_config"], daemon=False),  # may fork, unlike others of the pool
    ):
        writing.hook(filesystem_async)
        try:
            yield
        finally:
            for name, value in found.items():
                setattr(writer, name, value)


def write_and_read(rank: int, world: int, *, folder: str, own: bool) -> tuple[int, int, bool]:
    """Bytes that a save adds to the peak of memory; how often memory was given back; whether all is read as it was."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    from megatron_ext import spared_copies
    from scripts.measurements.checkpoint_model import peak_of
    from scripts.moe_trainer.checkpoint_writer import InProcessSave
    from tests.distributed.megatron_state import fresh_parallel_state

    fresh_parallel_state()
    scratch = DenseScratch(folder)
    tensors = []
    for number in range(PARTS):
        (tensor,) = scratch({"a": (WIDE,)}, torch.float32).values()
        tensors.append(tensor.copy_(torch.arange(WIDE) + number))
        scratch.settle()
    halves = {f"{n} {half}": part for n, t in enumerate(tensors) for half, part in enumerate(t.chunk(2))}
    released = Path(folder) / "released"

    def release() -> None:
        with released.open("a") as log:  # the writer may be another process
            log.write("x")
        scratch.let_go()

    def save(names: list[str]) -> None:
        path = Path(folder) / str(len(names))
        path.mkdir()
        state = {name: ShardedTensor.from_rank_offsets(name, halves[name]) for name in names}
        if own:
            dist_checkpointing.save(state, str(path), sharded_strategy=InProcessSave(release))
            return
        with hooked_writer(release):
            dist_checkpointing.save(
                state, str(path), sharded_strategy=TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=2)
            )

    save([*halves][:1])  # what Python and torch keep from the first time on
    scratch.let_go()
    before = peak_of(lambda: None)
    with patch.object(spared_copies, "RELEASE_BYTES", 8 << 20):
        added = peak_of(lambda: save([*halves])) - before
    template = {name: ShardedTensor.from_rank_offsets(name, torch.zeros_like(part)) for name, part in halves.items()}
    read = dist_checkpointing.load(template, str(Path(folder) / str(len(halves))))
    return added, len(released.read_text()), all(torch.equal(read[name], part) for name, part in halves.items())


@pytest.mark.parametrize("own", [True, False], ids=["the trainer's", "stock's"])
def test_halves_of_tensors_in_files(pools: Pools, tmp_path: Path, own: bool) -> None:
    ((added, released, same),) = pools[1].run(write_and_read, folder=str(tmp_path), own=own)
    assert same
    assert released >= PARTS * 4 // 8
    assert added < 32 << 20, "a third of what is written: 8 MiB before they leave, a copy, and noise"

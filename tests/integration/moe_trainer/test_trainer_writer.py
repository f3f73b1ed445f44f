"""Stock's format is written without a second model in memory, wherever its tensors lie, and reads as it was."""

from __future__ import annotations

from pathlib import Path

import torch

from megascale_omni.checkpoint.scratch import DenseScratch
from tests.distributed.pool import Pools

WIDE, PARTS = 1 << 20, 24  # 24 tensors of 4 MiB, each written as two halves


def write_and_read(rank: int, world: int, *, folder: str) -> tuple[int, int, bool]:
    """Bytes that a save adds to the peak of memory; how often memory was given back; whether all is read as it was."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    from scripts.measurements.checkpoint_model import peak_of
    from scripts.moe_trainer import checkpoint_writer
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
    released = []

    def release() -> None:
        released.append(1)
        scratch.let_go()

    def save(names: list[str]) -> None:
        path = Path(folder) / str(len(names))
        path.mkdir()
        state = {name: ShardedTensor.from_rank_offsets(name, halves[name]) for name in names}
        dist_checkpointing.save(state, str(path), sharded_strategy=InProcessSave(release))

    save([*halves][:1])  # what Python and torch keep from the first time on
    checkpoint_writer.RELEASE_BYTES = 8 << 20
    scratch.let_go()
    before = peak_of(lambda: None)
    added = peak_of(lambda: save([*halves])) - before
    template = {name: ShardedTensor.from_rank_offsets(name, torch.zeros_like(part)) for name, part in halves.items()}
    read = dist_checkpointing.load(template, str(Path(folder) / str(len(halves))))
    return added, len(released), all(torch.equal(read[name], part) for name, part in halves.items())


def test_halves_of_tensors_in_files(pools: Pools, tmp_path: Path) -> None:
    ((added, released, same),) = pools[1].run(write_and_read, folder=str(tmp_path))
    assert same
    assert released >= PARTS * 4 // 8
    assert added < 32 << 20, "a third of what is written: 8 MiB before they leave, a copy, and noise"

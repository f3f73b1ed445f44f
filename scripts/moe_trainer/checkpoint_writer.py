"""Stock's writer of distributed checkpoints, in this process, with little memory of its own.

[Note: late copies]
Part of a larger tensor is written as a copy, or all of that tensor would be. Stock makes all such copies before it
writes the first: where gate and up weights are one tensor they are a second model in memory. Nothing changes a tensor
while this process writes, so that each copy is made when its turn comes, and forgotten after it.
"""

import queue
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

RELEASE_BYTES = 32 * 2**20
"""Written bytes after which memory is given back."""


class InProcessSave(TorchDistSaveShardedStrategy):
    """Stock's `torch_dist` writer, in this process.

    Stock forks a writer process and starts a manager process to collect its results. Both serve asynchronous saves;
    here they would copy a process full of threads and import the main script again.

    Args:
        release: is called now and then, when what was written can leave memory.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        self._release = release

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> AsyncRequest:
        results: queue.Queue[Any] = queue.Queue()
        found = filesystem_async._results_queue, torch_strategies.FileSystemWriterAsync
        filesystem_async._results_queue, torch_strategies.FileSystemWriterAsync = results, _LateCopies
        try:
            request = super().async_save(sharded_state_dict, checkpoint_dir)
        finally:
            filesystem_async._results_queue, torch_strategies.FileSystemWriterAsync = found
        if request.async_fn is None:  # nothing to write on this rank
            return request
        transforms = request.async_fn.args[0]
        return request._replace(async_fn=partial(_write_here, transforms, self._release))


class _LateCopies(FileSystemWriterAsync):
    """Plans the write without copies; see [Note: late copies]."""

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self.write_buckets: list[Any] = []
        super().prepare_write_data(plan, _WithoutData(planner))
        self.write_buckets = [
            (path, key, (objects, [(item, planner.resolve_data(item).detach()) for item, _ in tensors]))
            for path, key, (objects, tensors) in self.write_buckets
        ]


class _WithoutData:
    """A planner whose host tensors have shapes only: stock leaves alone what is not in host memory."""

    def __init__(self, planner: SavePlanner) -> None:
        self._planner = planner

    def resolve_data(self, item: WriteItem) -> torch.Tensor | BytesIO:
        found = self._planner.resolve_data(item)
        return found.to("meta") if isinstance(found, torch.Tensor) and found.is_cpu else found


class _OneByOne:
    """The tensors of a bucket, each copied for its turn where it is part of a larger one."""

    def __init__(self, tensors: list[tuple[Any, torch.Tensor]], release: Callable[[], None]) -> None:
        self._tensors, self._release = tensors, release

    def __iter__(self) -> Iterator[tuple[Any, torch.Tensor]]:
        written = 0
        for item, tensor in self._tensors:
            is_part = tensor.untyped_storage().nbytes() != tensor.nbytes
            yield item, tensor.clone() if is_part else tensor
            written += tensor.nbytes
            if written >= RELEASE_BYTES:
                self._release()
                written = 0
        self._release()


def _write_here(
    transforms: list[Any], release: Callable[[], None], rank: int, buckets: list[Any], results: "queue.Queue[Any]"
) -> None:
    """Write each bucket into its file and put {bucket: results} or the first exception into `results`, as stock."""
    written: dict[int, Any] = {}
    for index, (path, key, (objects, tensors)) in enumerate(buckets):
        outcomes: queue.Queue[Any] = queue.Queue()
        pending: queue.Queue[Any] = queue.Queue()
        pending.put(index)
        FileSystemWriterAsync.write_preloaded_data(
            transforms,
            local_proc_idx=index,
            write_bucket=(path, key, (objects, _OneByOne(tensors, release))),
            results_queue=outcomes,
            count_queue=pending,
            use_fsync=True,
        )
        _, outcome = outcomes.get_nowait()
        if isinstance(outcome, Exception):
            results.put(outcome)
            return
        written[index] = outcome
    results.put(written)

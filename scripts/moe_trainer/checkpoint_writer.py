"""Stock's writer of distributed checkpoints in this process, without a second model in memory [Note: late copies]."""

import queue
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from megatron_ext.spared_copies import WithoutData, late_bucket, with_data


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
        super().prepare_write_data(plan, WithoutData(planner))
        self.write_buckets = with_data(self.write_buckets, planner)


def _write_here(
    transforms: list[Any], release: Callable[[], None], rank: int, buckets: list[Any], results: "queue.Queue[Any]"
) -> None:
    """Write each bucket into its file and put {bucket: results} or the first exception into `results`, as stock."""
    written: dict[int, Any] = {}
    for index, bucket in enumerate(buckets):
        outcomes: queue.Queue[Any] = queue.Queue()
        pending: queue.Queue[Any] = queue.Queue()
        pending.put(index)
        FileSystemWriterAsync.write_preloaded_data(
            transforms,
            local_proc_idx=index,
            write_bucket=late_bucket(bucket, release),
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

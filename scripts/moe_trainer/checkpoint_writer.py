"""Stock's writer of distributed checkpoints, in this process."""

import queue
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy


class InProcessSave(TorchDistSaveShardedStrategy):
    """Stock's `torch_dist` writer, in this process.

    Stock forks a writer process and starts a manager process to collect its results. Both serve asynchronous saves;
    here they would copy a process full of threads and import the main script again.
    """

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> AsyncRequest:
        results: queue.Queue[Any] = queue.Queue()
        found, filesystem_async._results_queue = filesystem_async._results_queue, results
        try:
            request = super().async_save(sharded_state_dict, checkpoint_dir)
        finally:
            filesystem_async._results_queue = found
        if request.async_fn is None:  # nothing to write on this rank
            return request
        transforms = request.async_fn.args[0]
        return request._replace(async_fn=partial(_write_here, transforms))


def _write_here(transforms: list[Any], rank: int, buckets: list[Any], results: "queue.Queue[Any]") -> None:
    """Write each bucket into its file and put {bucket: results} or the first exception into `results`, as stock."""
    written: dict[int, Any] = {}
    for index, bucket in enumerate(buckets):
        outcomes: queue.Queue[Any] = queue.Queue()
        pending: queue.Queue[Any] = queue.Queue()
        pending.put(index)
        FileSystemWriterAsync.write_preloaded_data(
            transforms,
            local_proc_idx=index,
            write_bucket=bucket,
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

"""Checkpoints in Megatron-LM's own layout and format (`torch_dist`), written and read by megatron-core.

    FOLDER/latest_checkpointed_iteration.txt    the iteration to load, as text
    FOLDER/iter_0000100/                        one checkpoint: common.pt, metadata.json, *.distcp

A checkpoint holds what Megatron-LM's does, under the same keys: args (with the consumed samples), checkpoint_version,
iteration, model (model0, model1 ... with virtual stages), optimizer, opt_param_scheduler, rng_state.
"""

import argparse
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.safe_globals import register_safe_globals
from megatron.core.transformer.module import MegatronModule
from torch.distributed.checkpoint import CheckpointException

import megatron_ext
from megatron_ext import patches

from .checkpoint_checks import (
    cause,
    check_folder,
    check_schedule,
    check_shape,
    check_tensors,
    describe,
    is_plain,
    load_or_refuse,
    read_common,
)
from .checkpoint_writer import InProcessSave
from .errors import UsageError

if TYPE_CHECKING:
    from .trainer import Trainer

TRACKER = "latest_checkpointed_iteration.txt"
_VERSION = 3.0


def save(trainer: "Trainer", folder: str | Path) -> str:
    """Write a checkpoint of the trainer's iteration. The tracker names it once it is complete. Returns its folder.

    Raises:
        RuntimeError: it could not be written, for want of space for instance. What was written of it is removed, and
            the tracker still names the one before.
    """
    path = _iteration_folder(folder, trainer.iteration)
    if trainer.is_first_rank:
        shutil.rmtree(path, ignore_errors=True)  # what an interrupted save left behind
        path.mkdir(parents=True)
    torch.distributed.barrier()
    metadata = _content_metadata(trainer.args)
    try:
        dist_checkpointing.save(
            _state_dict(trainer, metadata, loading=False),
            str(path),
            sharded_strategy=InProcessSave(_release),
            content_metadata={key: value for key, value in metadata.items() if key != "dp_cp_group"},
        )
    except (CheckpointException, OSError, RuntimeError) as error:
        if trainer.is_first_rank:
            shutil.rmtree(path, ignore_errors=True)
        raise RuntimeError(f"the checkpoint {path} could not be written: {describe(cause(error))}") from error
    torch.distributed.barrier()
    if trainer.is_first_rank:
        tracker = Path(folder) / TRACKER
        temporary = tracker.with_suffix(".part")
        temporary.write_text(str(trainer.iteration), encoding="ascii")
        temporary.replace(tracker)
    torch.distributed.barrier()
    return str(path)


def _release() -> None:
    """Let written copies of paged experts leave memory."""
    if megatron_ext.is_enabled():
        patches.active_runtime().export.let_go()


def load(trainer: "Trainer", folder: str | Path) -> None:
    """Continue `trainer` from the latest checkpoint (or `--ckpt-step`) under `folder`; without one, leave it alone.

    Raises:
        UsageError: a checkpoint of another shape or layout, a damaged one, none although it was demanded, or `folder`
            is one itself. The same error on every rank.
    """
    args = trainer.args
    trainer.distributed.agree(lambda: check_folder(folder, step=args.ckpt_step))
    iteration = args.ckpt_step
    if iteration is None:
        iteration = latest_iteration(folder)
    if iteration is None:
        if args.exit_on_missing_checkpoint:
            raise UsageError(f"--load {folder} holds no checkpoint ({TRACKER} is missing)")
        return
    path = _iteration_folder(folder, iteration)
    register_safe_globals()
    common: dict[str, Any] = {}
    trainer.distributed.agree(lambda: common.update(read_common(path)))
    with_optimizer, with_rng = not (args.finetune or args.no_load_optim), not (args.finetune or args.no_load_rng)
    trainer.distributed.agree(lambda: check_shape(args, common["args"], path, with_optimizer=with_optimizer))
    if with_optimizer:
        trainer.distributed.agree(lambda: check_schedule(trainer, common["opt_param_scheduler"], path))
    metadata = dict(dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {})
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    with_rng = with_rng and _same_layout(args, common["args"])
    template = _state_dict(trainer, metadata, loading=True, with_optimizer=with_optimizer, with_rng=with_rng)
    trainer.distributed.agree(lambda: check_tensors(template, path))
    state = load_or_refuse(template, path)
    for name, chunk in _chunks(trainer):
        chunk.load_state_dict(state[name])
    if with_optimizer:
        trainer.optimizer.load_state_dict(state["optimizer"])
        trainer.scheduler.load_state_dict(state["opt_param_scheduler"])
    else:
        trainer.optimizer.reload_model_params()
    if with_rng:
        _set_rng_state(state["rng_state"][0])
    if not args.finetune:
        trainer.iteration = int(state["iteration"])
        trainer.consumed_samples = int(state["args"].consumed_train_samples)
    torch.distributed.barrier()


def latest_iteration(folder: str | Path) -> int | None:
    """Return the iteration that the tracker names, or None where there is no tracker.

    Raises:
        UsageError: the tracker holds something else.
    """
    tracker = Path(folder) / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8").strip()
    if not text.isdigit():
        raise UsageError(f"{tracker} holds {text!r} instead of an iteration")
    return int(text)


def _iteration_folder(folder: str | Path, iteration: int) -> Path:
    return Path(folder) / f"iter_{iteration:07d}"


def _content_metadata(args: argparse.Namespace) -> dict[str, object]:
    """How the sharded state dicts are laid out; megatron-core keeps it in the checkpoint and needs it again to load."""
    metadata: dict[str, object] = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    if args.use_distributed_optimizer:
        reshardable = "fully_reshardable" if args.dist_ckpt_optim_fully_reshardable else "dp_reshardable"
        metadata["distrib_optim_sharding_type"] = reshardable
        if args.dist_ckpt_optim_fully_reshardable:
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    return metadata


def _chunks(trainer: "Trainer") -> list[tuple[str, DistributedDataParallel]]:
    if len(trainer.model) == 1:
        return [("model", trainer.model[0])]
    return [(f"model{index}", chunk) for index, chunk in enumerate(trainer.model)]


def _state_dict(
    trainer: "Trainer",
    metadata: dict[str, object],
    *,
    loading: bool,
    with_optimizer: bool | None = None,
    with_rng: bool | None = None,
) -> dict[str, Any]:
    args = trainer.args
    with_optimizer = not args.no_save_optim if with_optimizer is None else with_optimizer
    with_rng = not args.no_save_rng if with_rng is None else with_rng
    state: dict[str, Any] = {}
    if not loading:
        saved = argparse.Namespace(**{name: value for name, value in vars(args).items() if is_plain(value)})
        saved.consumed_train_samples, saved.consumed_valid_samples = trainer.consumed_samples, 0
        saved.skipped_train_samples = 0
        state.update(args=saved, checkpoint_version=_VERSION, iteration=trainer.iteration)
    for name, chunk in _chunks(trainer):
        state[name] = _unwrapped(chunk).sharded_state_dict(metadata=metadata)
    if with_optimizer:
        state["optimizer"] = trainer.optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
        state["opt_param_scheduler"] = trainer.scheduler.state_dict()
    if with_rng:
        state["rng_state"] = _rng_state()
    return state


def _unwrapped(chunk: MegatronModule) -> MegatronModule:
    """The module inside wrappers, as Megatron-LM saves it."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _rng_state() -> ShardedObject:
    """The random numbers of this rank: a shard a pipeline stage and, with expert parallelism, a data-parallel rank."""
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    shape = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    place = (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank())
    data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        data_size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        return ShardedObject("rng_state", [state], (*shape, data_size), (*place, data_rank), replica_id=0)
    return ShardedObject("rng_state", [state], shape, place, replica_id=data_rank)


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


def _same_layout(args: argparse.Namespace, saved: argparse.Namespace) -> bool:
    """Random numbers belong to ranks: they continue only where the ranks are laid out as they were."""
    names = (
        "world_size",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
    )
    return not getattr(saved, "no_save_rng", False) and all(
        getattr(saved, name, None) == getattr(args, name) for name in names
    )

"""What is wrong with a checkpoint in stock's format, or with loading it here: said before anything of it is loaded."""

import argparse
import io
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from megatron_ext.checkpoint_folders import check_load

from .errors import LocalUsageError, UsageError

if TYPE_CHECKING:
    from .trainer import Trainer

METADATA, COMMON = ".metadata", "common.pt"

_SHAPE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "kv_channels",
    "num_experts",
    "moe_ffn_hidden_size",
    "ffn_hidden_size",
    "max_position_embeddings",
    "position_embedding_type",
    "swiglu",
    "quick_geglu",
    "add_bias_linear",
    "normalization",
    "untie_embeddings_and_output_weights",
    "moe_layer_freq",
    "moe_shared_expert_intermediate_size",
)
"""Arguments that must be the same to load the weights. Those that a checkpoint does not name are not compared."""

_UNREADABLE = (CheckpointingException, UnpicklingError, OSError, EOFError, RuntimeError, KeyError, AttributeError)
"""What stock's readers raise for a damaged checkpoint."""

_SCHEDULE = {
    "max_lr": ("--lr", "start_lr"),
    "min_lr": ("--min-lr",),
    "lr_warmup_steps": ("--lr-warmup-iters", "warmup_iter", "warmup_steps"),
    "lr_decay_steps": ("--lr-decay-iters (or --train-iters)", "end_iter", "decay_steps"),
    "lr_decay_style": ("--lr-decay-style", "decay_style"),
    "start_wd": ("--weight-decay",),
    "end_wd": ("--weight-decay at the end",),
    "wd_incr_steps": ("--train-iters",),
    "wd_incr_style": ("the increase of the weight decay",),
}
"""What a schedule must have in common with the stored one: the flag that sets it, and older names of its key."""


# -- the arguments ----------------------------------------------------------------------------------------------------


def is_plain(value: object) -> bool:
    """Whether `torch.load` accepts the value without unpickling code."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def check_shape(
    args: argparse.Namespace,
    saved: argparse.Namespace,
    path: Path,
    *,
    with_optimizer: bool,
    elastic: bool = False,
) -> None:
    """Refuse a checkpoint whose arguments `saved` do not fit; an `elastic` one fits every layout. UsageError."""
    missing = object()
    different = [
        f"{name} {getattr(saved, name)} (here {getattr(args, name)})"
        for name in _SHAPE
        if getattr(saved, name, missing) not in (missing, getattr(args, name))
    ]
    if different:
        raise UsageError(
            f"the checkpoint {path} is of another shape: {', '.join(different)}. Use its settings, or another --load"
        )
    if not with_optimizer:
        return
    remedy = "use its settings, or load the weights alone with --no-load-optim"
    for name in ("optimizer", "bf16") if elastic else ("use_distributed_optimizer", "optimizer", "bf16"):
        if getattr(saved, name, getattr(args, name)) != getattr(args, name):
            raise UsageError(f"the checkpoint {path} was saved with {name}={getattr(saved, name)}: {remedy}")
    if getattr(saved, "no_save_optim", False):
        raise UsageError(f"the checkpoint {path} was saved with --no-save-optim: load it with --no-load-optim")
    if elastic:
        return
    # Paged experts have no layout of their own.
    layouts = [] if getattr(args, "megascale", False) else ["expert_model_parallel_size"]
    if args.use_distributed_optimizer and not getattr(saved, "dist_ckpt_optim_fully_reshardable", False):
        layouts += ["pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"]
    for name in layouts:
        if getattr(saved, name, getattr(args, name)) != getattr(args, name):
            raise UsageError(
                f"the optimizer state of the checkpoint {path} was saved at {name}={getattr(saved, name)}, "
                f"here it is {getattr(args, name)}, and stock cannot convert it: {remedy}"
            )


def check_schedule(trainer: "Trainer", state: dict[str, Any], path: Path) -> None:
    """Refuse a checkpoint that continues another schedule, where no flag says which one counts. UsageError."""
    args = trainer.args
    if args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler:
        return
    different = []
    for name, (flag, *older) in _SCHEDULE.items():
        here = getattr(trainer.scheduler, name)
        stored = next((state[key] for key in (name, *older) if key in state), here)
        if stored != here:
            different.append(f"{flag} {_of_schedule(args, name, stored)} (here {_of_schedule(args, name, here)})")
    if different:
        raise UsageError(
            f"the checkpoint {path} continues another schedule: {', '.join(different)}. To train on, or longer, on the "
            "stored schedule add --use-checkpoint-opt-param-scheduler; to change to the one given here, at the "
            "checkpoint's place in it, add --override-opt-param-scheduler"
        )


def _of_schedule(args: argparse.Namespace, name: str, value: Any) -> str:  # noqa: ANN401 - a setting
    """Schedules count samples; flags count iterations."""
    if not name.endswith("_steps"):
        return str(value)
    iterations, rest = divmod(value, args.global_batch_size)
    return f"{value} samples" if rest else f"{int(iterations)} iterations"


# -- the files --------------------------------------------------------------------------------------------------------


def check_folder(folder: str | Path, *, step: int | None) -> None:
    """Refuse a `--load` that is a checkpoint itself, or holds some of which none is named. UsageError."""
    try:
        check_load(folder, step=step)
    except ValueError as error:
        raise UsageError(str(error)) from error


def read_common(path: Path) -> dict[str, Any]:
    """The part of a checkpoint that all ranks read. UsageError where it cannot be read, naming the file."""
    if not path.is_dir():
        raise UsageError(f"the checkpoint {path} does not exist{_others(path)}")
    try:
        common: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(path))
    except _UNREADABLE as error:
        name = f"{COMMON} " if (path / "metadata.json").is_file() else ""
        raise UsageError(f"the checkpoint {path} cannot be read: {name}{describe(error)}{_others(path)}") from error
    if "args" not in common or "iteration" not in common:
        raise UsageError(f"the checkpoint {path} is incomplete: it names no arguments or no iteration{_others(path)}")
    return common


def check_tensors(template: dict[str, Any], path: Path) -> None:
    """Compare files and the shapes of all tensors wanted with those stored, so that nothing is loaded in part."""
    try:
        stored = dist_checkpointing.load_tensors_metadata(str(path))
    except _UNREADABLE as error:
        raise UsageError(
            f"the checkpoint {path} cannot be read: {METADATA} {describe(error)}{_others(path)}"
        ) from error
    damaged = _short_files(path)
    if damaged:
        raise UsageError(f"the checkpoint {path} cannot be read: {'; '.join(damaged)}{_others(path)}")
    wanted: dict[str, ShardedTensor] = {}
    _collect_tensors(template, wanted)
    for key, tensor in wanted.items():
        if key not in stored:
            raise UsageError(f"the checkpoint {path} has no tensor {key}: it is of another shape or layout")
        if tuple(stored[key].global_shape) != tuple(tensor.global_shape):
            raise UsageError(
                f"the checkpoint {path} is of another shape: {key} is {tuple(stored[key].global_shape)}, "
                f"here {tuple(tensor.global_shape)}"
            )


def _collect_tensors(value: object, found: dict[str, ShardedTensor]) -> None:
    if isinstance(value, ShardedTensor):
        found[value.key] = value
    elif isinstance(value, dict):
        for item in value.values():
            _collect_tensors(item, found)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect_tensors(item, found)


def load_or_refuse(template: dict[str, Any], path: Path) -> dict[str, Any]:
    """What stock loads. UsageError for what it cannot read, with the file where that can be told."""
    try:
        state: dict[str, Any] = dist_checkpointing.load(template, str(path))
    except CheckpointException as error:  # the reader tells every rank what struck one of them
        words = "; ".join(_unreadable_items(path)) or describe(cause(error))
        raise UsageError(f"the checkpoint {path} cannot be read: {words}{_others(path)}") from error
    except _UNREADABLE as error:
        raise LocalUsageError(f"the checkpoint {path} does not load here: {describe(error)}{_others(path)}") from error
    return state


def _items(path: Path) -> Iterator[tuple[Path, int, int]]:
    """(file, first byte, bytes) of everything that the checkpoint's metadata names."""
    for info in (FileSystemReader(path).read_metadata().storage_data or {}).values():
        yield path / info.relative_path, info.offset, info.length


def _short_files(path: Path) -> list[str]:
    """Files that are missing, or end before the last of their items does."""
    needed: dict[Path, int] = {}
    for file, offset, length in _items(path):
        needed[file] = max(needed.get(file, 0), offset + length)
    found = []
    for file, nbytes in sorted(needed.items()):
        if not file.is_file():
            found.append(f"{file.name} is missing")
        elif file.stat().st_size < nbytes:
            found.append(f"{file.name} has {file.stat().st_size} bytes of {nbytes}")
    return found


def _unreadable_items(path: Path) -> list[str]:
    """Files with an item that torch does not read."""
    found: dict[str, str] = {}
    for file, offset, length in _items(path):
        try:
            with file.open("rb") as opened:
                opened.seek(offset)
                torch.load(io.BytesIO(opened.read(length)), map_location="cpu", weights_only=True)
        except _UNREADABLE as error:
            found.setdefault(file.name, f"{file.name}, bytes {offset}..{offset + length}: {describe(error)}")
    return list(found.values())


def _others(path: Path) -> str:
    """What else could be loaded."""
    others = sorted(int(p.name[5:]) for p in path.parent.glob("iter_*") if p != path and p.name[5:].isdigit())
    if others:
        return f". Load another one with --ckpt-step: there are {', '.join(map(str, others))}"
    return ". There is no other one beside it: restore it from a copy, or start anew without --load"


def cause(error: BaseException) -> BaseException:
    """What struck a rank, where the writer or reader of all of them says so."""
    if isinstance(error, CheckpointException) and error.failures:
        _, (found, _) = min(error.failures.items(), key=lambda item: item[0])
        assert isinstance(found, BaseException)
        return found
    return error


def describe(error: BaseException) -> str:
    """An error in one line, without torch's advice to load what it cannot trust."""
    lines = str(error).splitlines() or [""]
    told = next((line for line in lines if "WeightsUnpickler error" in line), lines[0])
    return f"{type(error).__name__}: {told.strip()}".rstrip(": ")

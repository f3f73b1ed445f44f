"""Megatron-LM's ``save_checkpoint`` and ``load_checkpoint`` with ``--megascale``: the paged format, another EP size."""

from __future__ import annotations

import argparse
import math
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megascale_omni.checkpoint.store import is_store
from megatron_ext.megatron_lm import session
from megatron_ext.megatron_lm.hooks import MisuseError, argument, wrap

LoadResult = tuple[int, int]
"""Iteration, and floating-point operations so far."""


def hook(module: types.ModuleType) -> None:
    """Hooks ``megatron.training.checkpointing``."""
    takes = ("iteration", "model", "optimizer", "opt_param_scheduler", "num_floating_point_operations_so_far")
    wrap(module, "save_checkpoint", _save, takes=takes)
    wrap(module, "load_checkpoint", _load, takes=("ddp_model", "optimizer", "opt_param_scheduler", "load_arg"))


def _save(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - stock's
    running = session.current()
    if running is None or running.config.checkpoint.format != "paged":
        return original(*args, **kwargs)
    iteration = int(argument(original, "iteration", args, kwargs))
    operations = int(argument(original, "num_floating_point_operations_so_far", args, kwargs))
    schedule = argument(original, "opt_param_scheduler", args, kwargs)
    options = _options()
    paged = running.checkpoints(options.save, argument(original, "optimizer", args, kwargs))
    path = paged.save(
        _position(iteration, operations, schedule),
        include_optimizer=not options.no_save_optim,
        include_rng_state=not options.no_save_rng,
    )
    _say(f"  saved checkpoint {path} in MegaScale's paged format")
    return None


def _position(iteration: int, operations: int, schedule: Any) -> Any:  # noqa: ANN401 - stock's scheduler
    from megatron_ext.checkpoints import Position

    options = _options()
    values = {
        "args": {name: value for name, value in vars(options).items() if is_plain(value)},
        "floating_point_operations": operations,
    }
    kept = None if options.no_save_optim or schedule is None else schedule.state_dict()
    return Position(iteration, values, kept)


def _load(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - stock's
    folder = getattr(_options(), argument(original, "load_arg", args, kwargs), None)
    running = session.current()
    if folder is None or not is_store(Path(folder)):
        with _numbers_that_fit(folder, megascale=running is not None):
            return original(*args, **kwargs)
    if running is None:
        raise MisuseError(f"{folder} holds checkpoints of MegaScale's paged format: add --megascale")
    running.model = argument(original, "ddp_model", args, kwargs)
    optimizer = argument(original, "optimizer", args, kwargs)
    schedule = argument(original, "opt_param_scheduler", args, kwargs)
    return _load_paged(running, folder, optimizer, schedule)


def _load_paged(running: session.Session, folder: str, optimizer: Any, schedule: Any) -> LoadResult:  # noqa: ANN401
    from megatron.training import checkpointing as stock

    options = _options()
    with_optimizer = not (options.finetune or options.no_load_optim)
    with_rng = not (options.finetune or options.no_load_rng)
    tag = f"iter_{options.ckpt_step:07d}" if options.ckpt_step else None

    def check(position: Any) -> None:  # noqa: ANN401
        if not options.finetune:
            try:
                stock.check_checkpoint_args(argparse.Namespace(**position.values["args"]))
            except AssertionError as error:
                raise ValueError(f"the checkpoint in {folder} does not fit: {error}") from error

    stock.set_checkpoint_version(3.0)  # stock compares arguments by it
    paged = running.checkpoints(folder, optimizer, remember=folder == options.save)
    position = paged.load(tag=tag, include_optimizer=with_optimizer, include_rng_state=with_rng, check=check)
    if folder != options.save:
        paged.close()
    if position is None:
        if options.exit_on_missing_checkpoint:
            raise MisuseError(f"--load {folder} holds no whole checkpoint")
        return 0, 0
    saved = position.values["args"]
    if with_optimizer and schedule is not None and position.schedule is not None:
        schedule.load_state_dict(dict(position.schedule))
    if options.finetune:
        return 0, 0
    for name in ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples"):
        setattr(options, name, saved.get(name, 0))
    stock.update_num_microbatches(consumed_samples=options.consumed_train_samples, verbose=True)
    _say(f"  loaded checkpoint of iteration {position.iteration} from {folder} (MegaScale's paged format)")
    return position.iteration, int(position.values["floating_point_operations"])


@contextmanager
def _numbers_that_fit(folder: str | None, *, megascale: bool) -> Iterator[None]:
    """While stock loads a checkpoint of other expert-parallel or data-parallel sizes, random numbers are left out.

    They belong to ranks; stock looks for those of this layout, does not find them, and gives up.
    """
    options = _options()
    if not megascale or folder is None or options.no_load_rng or options.ckpt_format != "torch_dist":
        yield
        return
    why = _other_random_numbers(options, folder)
    if why is None:
        yield
        return
    _say(f"  {why}: random numbers begin anew")
    options.no_load_rng = True
    try:
        yield
    finally:
        options.no_load_rng = False


def _other_random_numbers(options: argparse.Namespace, folder: str) -> str | None:
    """Why the random numbers of a checkpoint are not this run's; None where they are, or where it has none."""
    from megatron.core import dist_checkpointing
    from megatron.training import checkpointing as stock

    tracker = stock.get_checkpoint_tracker_filename(folder)
    if not Path(tracker).is_file():
        return None
    iteration, release = stock.read_metadata(tracker)
    path = stock.get_checkpoint_name(folder, options.ckpt_step or iteration, release, return_base_dir=True)
    if not (Path(path) / "metadata.json").is_file():
        return None
    saved = dist_checkpointing.load_common_state_dict(path).get("args")
    there, here = (getattr(a, "expert_model_parallel_size", 1) or 1 for a in (saved, options))
    if min(there, here) == 1 and max(there, here) > 1:
        return f"the checkpoint was saved at --expert-model-parallel-size {there}, here it is {here}"
    data = [getattr(a, "data_parallel_size", None) for a in (saved, options)]
    if here > 1 and data[0] != data[1]:
        return f"the checkpoint was saved by {data[0]} data-parallel ranks, here there are {data[1]}"
    return None


def is_plain(value: object) -> bool:
    """Whether a value of an argument can be stored as JSON."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def _options() -> argparse.Namespace:
    from megatron.training import get_args

    options: argparse.Namespace = get_args()
    return options


def _say(text: str) -> None:
    if torch.distributed.get_rank() == 0:
        print(text, flush=True)

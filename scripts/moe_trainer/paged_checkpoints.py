"""Checkpoints in the plug-in's own format: what the trainer keeps in them, and when it saves and loads them."""

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import megatron_ext
from megascale_omni.checkpoint.checkpointer import SaveError
from megascale_omni.checkpoint.store import is_store
from megatron_ext.checkpoints import PagedCheckpoints, Position

from .checkpoint_checks import check_schedule, check_shape, is_plain
from .errors import LocalUsageError, UsageError

if TYPE_CHECKING:
    from .trainer import Trainer

logger = logging.getLogger(__name__)


def is_wanted(args: argparse.Namespace) -> bool:
    """Whether checkpoints are saved in the plug-in's format."""
    config = megatron_ext.config_from_args(args)
    return config is not None and config.checkpoint.format == "paged"


def is_there(folder: str | Path) -> bool:
    """Whether a folder holds checkpoints of the plug-in's format."""
    return is_store(Path(folder))


class TrainerCheckpoints:
    """A trainer's checkpoints in one folder."""

    def __init__(self, trainer: "Trainer", folder: str | Path) -> None:
        config = megatron_ext.config_from_args(trainer.args)
        if config is None:
            raise UsageError(f"{folder} holds checkpoints of --megascale's own format; add --megascale")
        self._trainer, self.folder = trainer, str(folder)
        self._checkpoints = PagedCheckpoints(
            folder, chunks=trainer.model, optimizer=trainer.optimizer, config=config.checkpoint
        )

    def save(self) -> str:
        """Write a checkpoint, or begin to. Returns its folder. RuntimeError where it could not be written."""
        trainer, args = self._trainer, self._trainer.args
        values = {
            "args": {name: value for name, value in vars(args).items() if is_plain(value)},
            "consumed_samples": trainer.consumed_samples,
        }
        schedule = None if args.no_save_optim else trainer.scheduler.state_dict()
        position = Position(trainer.iteration, values, schedule)
        try:
            path = self._checkpoints.save(
                position, include_optimizer=not args.no_save_optim, include_rng_state=not args.no_save_rng
            )
        except SaveError as error:
            raise RuntimeError(str(error)) from error
        return str(path)

    def load(self) -> bool:
        """Continue the trainer from the newest whole checkpoint (or `--ckpt-step`); False where there is none."""
        trainer, args = self._trainer, self._trainer.args
        with_optimizer, with_rng = not (args.finetune or args.no_load_optim), not (args.finetune or args.no_load_rng)
        tag = None if args.ckpt_step is None else f"iter_{args.ckpt_step:07d}"

        def check(position: Position) -> None:
            saved = argparse.Namespace(**position.values["args"])
            check_shape(args, saved, Path(self.folder), with_optimizer=with_optimizer, elastic=True)
            if with_optimizer and position.schedule is not None:
                check_schedule(trainer, dict(position.schedule), Path(self.folder))

        try:
            position = self._checkpoints.load(
                tag=tag, include_optimizer=with_optimizer, include_rng_state=with_rng, check=check
            )
        except UsageError:
            raise
        except ValueError as error:
            raise LocalUsageError(str(error)) from error
        if position is None:
            return False
        if with_optimizer:
            assert position.schedule is not None
            trainer.scheduler.load_state_dict(dict(position.schedule))
        if not args.finetune:
            trainer.iteration = position.iteration
            trainer.consumed_samples = int(position.values["consumed_samples"])
        return True

    def record(self, loss: float, learning_rate: float) -> None:
        """Write the step that was just made into the journal."""
        trainer = self._trainer
        self._checkpoints.record(
            trainer.iteration, loss=loss, learning_rate=learning_rate, position=trainer.consumed_samples
        )

    def poll(self) -> None:
        """Between steps."""
        self._checkpoints.poll()

    def finish(self) -> None:
        """At the end: wait for the save under way."""
        self._checkpoints.finish()

    def close(self) -> None:
        """Give up what is under way."""
        self._checkpoints.close()

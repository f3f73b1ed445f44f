"""Small training runs inside the ranks of a pool. Imported by functions that ranks run, not by tests."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scripts.moe_trainer.trainer import StepResult, Trainer

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --num-experts 4 --seq-length 16 "
    "--micro-batch-size 2 --global-batch-size 8 --moe-aux-loss-coeff 0.01 --train-iters 6 --lr 3e-3 "
    "--lr-warmup-iters 2 --weight-decay 0.1 --split 90,10 --eval-interval 100 --eval-iters 2 --log-params-norm "
    "--log-num-zeros-in-grad --distributed-timeout-minutes 2"
)

Numbers = tuple[float, float | None, float | None, float | None, float]


def trainer(corpus: str, flags: str = "") -> Trainer:
    """A trainer of the model above with more flags; use it as a context manager."""
    from scripts.moe_trainer.arguments import parse_args
    from scripts.moe_trainer.trainer import Trainer

    _spare_the_collector_what_was_imported()
    return Trainer(parse_args([*MODEL.split(), "--data-path", corpus, *flags.split()]))


@functools.cache
def _spare_the_collector_what_was_imported() -> None:
    """A trainer collects garbage when it closes; to look through all of torch each time would outlast its steps."""
    gc.collect()
    gc.freeze()


def numbers(step: StepResult) -> Numbers:
    """All that a step reports and that may not depend on the machine."""
    return step.loss, step.grad_norm, step.num_zeros, step.params_norm, step.learning_rate


def steps(run: Trainer, count: int) -> list[Numbers]:
    """The numbers of the next steps."""
    return [numbers(run.train_step()) for _ in range(count)]


def straight(rank: int, world: int, *, corpus: str, flags: str, count: int) -> list[Numbers]:
    """A run from the start."""
    with trainer(corpus, flags) as run:
        return steps(run, count)


def several(rank: int, world: int, *, corpus: str, flags: Sequence[str], count: int) -> list[list[Numbers]]:
    """Runs one after the other in the same processes."""
    return [straight(rank, world, corpus=corpus, flags=one, count=count) for one in flags]


def threads_after(rank: int, world: int, *, corpus: str, flags: Sequence[str]) -> list[int]:
    """How many threads the process has after each of several short runs."""
    counts = []
    for one in flags:
        straight(rank, world, corpus=corpus, flags=one, count=2)
        counts.append(len(list(Path("/proc/self/task").iterdir())))
    return counts


def interrupted(
    rank: int, world: int, *, corpus: str, flags: str, folder: str, before: int, after: int
) -> list[Numbers]:
    """A run that is saved, ended, and continued by a new trainer."""
    with trainer(corpus, f"{flags} --save {folder}") as run:
        first = steps(run, before)
        run.save()
    with trainer(corpus, f"{flags} --load {folder}") as run:
        assert (run.iteration, run.consumed_samples) == (before, before * run.args.global_batch_size)
        return [*first, *steps(run, after)]


def saved(rank: int, world: int, *, corpus: str, flags: str, folder: str, count: int) -> None:
    """A run that leaves a checkpoint."""
    with trainer(corpus, f"{flags} --save {folder}") as run:
        steps(run, count)
        run.save()


def refused(rank: int, world: int, *, corpus: str, flags: str) -> str:
    """What a trainer says that cannot start."""
    from scripts.moe_trainer.errors import LocalUsageError, UsageError

    try:
        trainer(corpus, flags)
    except LocalUsageError as error:
        return f"on this rank only: {error}"
    except UsageError as error:
        return str(error)
    raise AssertionError("it started")


def with_validation(rank: int, world: int, *, corpus: str, flags: str, count: int) -> tuple[list[Numbers], list[float]]:
    """A run that validates before every step, twice."""
    taken: list[Numbers] = []
    losses: list[float] = []
    with trainer(corpus, flags) as run:
        for _ in range(count):
            losses += [run.evaluate(), run.evaluate()]
            taken += steps(run, 1)
    return taken, losses


def halves(rank: int, world: int, *, corpus: str, flags: str, count: int) -> list[tuple[float, float | None]]:
    """A run whose gradients are computed twice before each optimizer step."""
    taken = []
    with trainer(corpus, flags) as run:
        for _ in range(count):
            losses = {run.forward_backward(), run.forward_backward()}
            assert len(losses) == 1
            taken.append((losses.pop(), run.optimizer_step().grad_norm))
    return taken


def out_of_space(rank: int, world: int, *, corpus: str, folder: str, limit_bytes: int) -> str:
    """Save, then save again where files may not grow beyond `limit_bytes`. Returns the error; the trainer goes on."""
    import resource

    with trainer(corpus, f"--expert-model-parallel-size {world} --save {folder}") as run:
        steps(run, 1)
        run.save()
        steps(run, 1)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
        try:
            run.save()
        except RuntimeError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    raise AssertionError("it was saved")

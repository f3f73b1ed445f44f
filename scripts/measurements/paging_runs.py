"""Whole training runs whose pages leave memory, beside runs with every page resident, and beside stock."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

from scripts.comparison.limited import TARGET, Limited, train_under_limit
from scripts.measurements.rows import Context
from scripts.measurements.slow_io import delayed_io
from scripts.measuring.processes import Workers
from scripts.measuring.progress import say

Io = Literal["prefetch", "no prefetch", "delayed"]
IO: tuple[Io, ...] = ("prefetch", "no prefetch", "delayed")
BUDGETS = ("10%", "25%", "50%", "100%")
_STEPS = 3
_TIMEOUT_SECONDS = 900.0
_LONGEST_PAUSE_SECONDS = 2e-3

_MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 512 --num-experts 16 "
    "--moe-router-topk 2 --moe-aux-loss-coeff 0.01 --swiglu --disable-bias-linear --seq-length 64 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-warmup-iters 2 --train-iters 20 --split 90,10 "
    "--eval-iters 1 --eval-interval 100 --megascale-page-size 256KiB"
)
"""192 MiB of expert state in experts of three pages."""

LAYOUTS = {
    # name: (ranks, flags)
    "single": (1, ""),
    "ep2": (2, "--expert-model-parallel-size 2"),
    "ep2dp2": (4, "--expert-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
}


@dataclass(frozen=True)
class Trained:
    """Losses and norms of a run's steps and its validation loss; pages that left memory on this rank."""

    numbers: tuple[float | None, ...]
    evicted: int


class BudgetRuns:
    """Trains again and again from the same start, in the process of a rank."""

    def __init__(self, rank: int, world: int, *, flags: Sequence[str]) -> None:
        self._rank, self._world, self._flags = rank, world, list(flags)

    def train(self, budget: str | None, io: Io, folder: str) -> Trained:
        """A few steps and an evaluation under a device budget (None: every page resident)."""
        from megascale_omni.experts.overview import managers
        from scripts.moe_trainer.arguments import parse_args
        from scripts.moe_trainer.trainer import Trainer

        flags = [*self._flags, "--megascale"]
        if budget is not None:
            flags += ["--megascale-device-budget", budget, "--megascale-disk-path", folder]
            flags += ["--megascale-prefetch", "none"] if io == "no prefetch" else []
        with delayed_io(self._rank, longest=_LONGEST_PAUSE_SECONDS) if io == "delayed" else nullcontext():
            with Trainer(parse_args(flags, world_size=self._world)) as trainer:
                numbers: list[float | None] = []
                for _ in range(_STEPS):
                    result = trainer.train_step()
                    numbers += [result.loss, result.grad_norm]
                numbers.append(trainer.evaluate())
                evicted = sum(m.stats().get("pages_evicted", 0) for m in managers(trainer.model))
        return Trained(tuple(numbers), evicted)


def different_runs(context: Context, layout: str) -> float:
    """P1: how many runs under budgets do not have the numbers of the resident run, bit for bit.

    Raises:
        RuntimeError: a run under a budget below all pages never let one leave; it would prove nothing.
    """
    ranks, options = LAYOUTS[layout]
    flags = [*f"{_MODEL} {options}".split(), "--data-path", str(context.data_path)]
    different = 0
    with tempfile.TemporaryDirectory(prefix="megascale-paging-") as folder:
        with Workers(
            "scripts.measurements.paging_runs:BudgetRuns",
            ranks=ranks,
            threads=1,
            name=layout,
            arguments={"flags": flags},
        ) as workers:

            def train(budget: str | None, io: Io) -> list[Trained]:
                found: list[Trained] = workers.call(
                    "train", timeout_seconds=_TIMEOUT_SECONDS, budget=budget, io=io, folder=folder
                )
                return found

            expected = [trained.numbers for trained in train(None, "prefetch")]
            for budget in BUDGETS:
                for io in IO:
                    found = train(budget, io)
                    same = [trained.numbers for trained in found] == expected
                    left = [trained.evicted for trained in found]
                    say(f"    {layout}, {budget}, {io}: {'equal' if same else 'DIFFERENT'}, pages that left: {left}")
                    if budget != "100%" and not all(left):
                        raise RuntimeError(f"{layout}: under a budget of {budget} no page left a rank's memory")
                    different += not same
    return different


# -- more state than memory --------------------------------------------------------------------------------------------

_LARGE = (
    "--hidden-size 512 --ffn-hidden-size 2048 --num-attention-heads 8 --num-experts 16 --moe-router-topk 2 "
    "--disable-bias-linear --seq-length 128 --micro-batch-size 4 --global-batch-size 4 --lr 3e-4 --train-iters 10 "
    "--split 100 --position-embedding-type rope --normalization RMSNorm"
)
_STATE_BYTES_A_LAYER = 16 * 2 * 512 * 2048 * 4 * 4
"""Experts' weights, gradients and two moments in fp32."""
_LIMITED_STEPS = 2


def trained_at(context: Context, factor: int, *, limit_bytes: int, budget: str) -> Limited:
    """P6: stock and MegaScale with `limit_bytes` of memory and `factor` times as much expert state."""
    layers = -(-factor * limit_bytes // _STATE_BYTES_A_LAYER)
    flags = [*f"{_LARGE} --num-layers {layers}".split(), "--data-path", str(context.data_path)]
    with tempfile.TemporaryDirectory(prefix="megascale-paging-") as folder:
        paged = [*flags, "--megascale", "--megascale-device-budget", budget, "--megascale-disk-path", folder]
        paged += ["--megascale-page-size", "2MiB"]
        say(f"    stock without a limit, {layers} layers, {layers * _STATE_BYTES_A_LAYER / 2**30:.1f} GiB of state")
        with Workers(TARGET, ranks=1, threads=2, name="stock", arguments={"flags": flags}) as workers:
            (steps,) = workers.call("train", steps=_LIMITED_STEPS, timeout_seconds=_TIMEOUT_SECONDS)
        return train_under_limit(
            {"stock": flags, "megascale": paged},
            limit_bytes=limit_bytes,
            expected=[step.loss for step in steps],
            steps=_LIMITED_STEPS,
            threads=2,
        )

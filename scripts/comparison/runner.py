"""Runs that take turns: each in processes of its own, block after block of steps."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from scripts.comparison.result import MEGASCALE, STOCK, Comparison, Run
from scripts.comparison.worker import Made, Step, Totals
from scripts.measuring.environment import measured_environment
from scripts.measuring.memory import MemorySampler
from scripts.measuring.processes import Workers
from scripts.measuring.progress import Progress, say

TARGET = "scripts.comparison.worker:TrainingRun"
STEP_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Plan:
    """What to run. `flags`: of `pretrain_moe.py`, those of every run; `megascale_flags`: in addition for MegaScale."""

    preset: str
    flags: tuple[str, ...]
    megascale_flags: tuple[str, ...]
    ranks: int
    threads: int
    warmup: int
    """Steps of each run that are not measured."""
    steps: int
    """Measured steps of each run, in `repeats` blocks of about the same length."""
    repeats: int
    validate: bool

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("ranks", "threads", "steps", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least 1")
        if self.warmup < 1:
            raise ValueError(
                f"--warmup {self.warmup} must be at least 1: the first step also makes what later ones reuse"
            )
        if self.steps < self.repeats:
            raise ValueError(f"--steps {self.steps} cannot be divided into --repeats {self.repeats} blocks")

    def block_lengths(self) -> list[int]:
        """Steps of each block."""
        short, longer = divmod(self.steps, self.repeats)
        return [short + (index < longer) for index in range(self.repeats)]


def default_threads(ranks: int) -> int:
    """Threads a rank: the cores that this process may use, divided."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


@dataclass
class _Side:
    """A run while it goes on."""

    name: str
    workers: Workers
    sampler: MemorySampler
    made: Made | None = None
    warmup: list[Step] = field(default_factory=list)
    blocks: list[list[Step]] = field(default_factory=list)
    sent_bytes: int = 0
    validation_loss: float | None = None

    def train(self, steps: int) -> list[Step]:
        self.sampler.resume()
        try:
            by_rank: list[list[Step]] = self.workers.call(
                "train", steps=steps, timeout_seconds=STEP_TIMEOUT_SECONDS * steps
            )
        finally:
            self.sampler.pause()
        self.sent_bytes += sum(step.sent_bytes for made in by_rank for step in made)
        return by_rank[0]

    def finish(self) -> Run:
        assert self.made is not None
        totals: list[Totals] = self.workers.call("totals", timeout_seconds=60)
        measured = sum(map(len, self.blocks))
        return Run(
            name=self.name,
            made=self.made,
            warmup=tuple(self.warmup),
            blocks=tuple(map(tuple, self.blocks)),
            sent_bytes_per_step=self.sent_bytes / measured,
            totals=tuple(totals),
            memory=self.sampler.samples,
            validation_loss=self.validation_loss,
        )


def compare(plan: Plan) -> Comparison:
    """Train both sides and return what was measured.

    Raises:
        WorkersFailed: a run failed; the other one is ended too.
    """
    environment = measured_environment(threads=plan.threads)
    with ExitStack() as stack:
        sides = [_start(stack, plan, name) for name in (STOCK, MEGASCALE)]
        say(f"starting {STOCK} and {MEGASCALE}, {plan.ranks} rank(s) of {plan.threads} thread(s) each")
        for side in sides:
            side.workers.wait_until_ready()
            side.made = side.workers.call("describe", timeout_seconds=120)[0]
        with Progress(plan.preset, len(sides) * (plan.warmup + plan.steps)) as progress:
            for side in sides:
                side.warmup = side.train(plan.warmup)
                side.sent_bytes = 0  # of measured steps only
                progress.advance(plan.warmup, note=f"{side.name} warmed up")
            for index, length in enumerate(plan.block_lengths()):
                for side in _in_turn(sides, index):
                    side.blocks.append(side.train(length))
                    progress.advance(length, note=f"{side.name} loss {side.blocks[-1][-1].loss:.4f}")
        if plan.validate:
            for side in sides:
                losses = side.workers.call("validate", timeout_seconds=STEP_TIMEOUT_SECONDS)
                side.validation_loss = losses[0]
        return Comparison(environment, plan.preset, tuple(side.finish() for side in sides))


def _start(stack: ExitStack, plan: Plan, name: str) -> _Side:
    extra = ("--megascale", *plan.megascale_flags) if name == MEGASCALE else ()
    workers = stack.enter_context(
        Workers(
            TARGET,
            ranks=plan.ranks,
            threads=plan.threads,
            name=name,
            arguments={"flags": [*plan.flags, *extra]},
        )
    )
    return _Side(name, workers, MemorySampler(workers.process_ids))


def _in_turn(sides: Sequence[_Side], index: int) -> list[_Side]:
    """Each block begins with another side, so that none always runs on the heels of the same one."""
    return list(sides) if index % 2 == 0 else list(reversed(sides))

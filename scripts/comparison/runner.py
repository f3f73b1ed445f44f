"""Runs that take turns: each in processes of its own, block after block of steps."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from scripts.comparison.limited import TARGET, Limited, train_under_limit
from scripts.comparison.result import MEGASCALE, STOCK, Comparison, Run, paged_name
from scripts.comparison.worker import Made, Step, Totals
from scripts.measuring.environment import measured_environment
from scripts.measuring.memory import MemorySampler
from scripts.measuring.processes import Workers
from scripts.measuring.progress import Progress, say

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
    budgets: tuple[str, ...] = ()
    """Device budgets, e.g. `25%`: one more MegaScale run for each."""
    disk_path: Path | None = None
    """Where pages go that leave memory."""
    limited_steps: int = 0
    """Steps that stock and the run under the first budget try with memory half way between what they had; 0: none."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.limited_steps and not self.budgets:
            raise ValueError("a memory limit follows from a run under a device budget: give --budget, e.g. 25%")
        if self.budgets and self.disk_path is None:
            raise ValueError("a device budget needs a folder for the pages that leave: give --disk-path")
        for name in ("ranks", "threads", "steps", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least 1")
        if self.warmup < 1:
            raise ValueError(
                f"--warmup {self.warmup} must be at least 1: the first step also makes what later ones reuse"
            )
        if self.steps < self.repeats:
            raise ValueError(f"--steps {self.steps} cannot be divided into --repeats {self.repeats} blocks")

    def flags_of(self, name: str) -> list[str]:
        """Flags of the run of that name."""
        if name == STOCK:
            return list(self.flags)
        flags = [*self.flags, "--megascale", *self.megascale_flags]
        for budget in self.budgets:
            if name == paged_name(budget):
                flags += ["--megascale-device-budget", budget, "--megascale-disk-path", str(self.disk_path)]
        return flags

    @property
    def target(self) -> str:
        """The class whose objects are the runs, one a rank."""
        return TARGET

    def arguments_of(self, name: str) -> dict[str, object]:
        """What the object of the run of that name is made with."""
        return {"flags": self.flags_of(name)}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the runs."""
        return (STOCK, MEGASCALE, *map(paged_name, self.budgets))

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
    """Train all sides and return what was measured.

    Raises:
        WorkersFailed: a run failed; the others are ended too.
    """
    environment = measured_environment(threads=plan.threads)
    with ExitStack() as stack:
        say(f"starting {', '.join(plan.names)}: {plan.ranks} rank(s) of {plan.threads} thread(s) each")
        sides = [_start(stack, plan, name) for name in plan.names]
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
                say(f"validating {side.name}")
                losses = side.workers.call("validate", timeout_seconds=STEP_TIMEOUT_SECONDS)
                side.validation_loss = losses[0]
        runs = tuple(side.finish() for side in sides)
    return Comparison(environment, plan.preset, runs, _limited(plan, runs) if plan.limited_steps else None)


def _limited(plan: Plan, runs: Sequence[Run]) -> Limited:
    """What becomes of stock and of the run under the first budget with memory half way between what they had.

    The memory is that of one rank's process, apart from files and shared libraries, as seen between steps.
    """
    stock, paged = runs[0], runs[2]
    had = [max(totals.peak_data_bytes for totals in run.totals) for run in (stock, paged)]
    return train_under_limit(
        {STOCK: plan.flags_of(STOCK), paged.name: plan.flags_of(paged.name)},
        limit_bytes=sum(had) // 2,
        expected=[step.loss for step in paged.steps],
        steps=plan.limited_steps,
        ranks=plan.ranks,
        threads=plan.threads,
    )


def _start(stack: ExitStack, plan: Plan, name: str) -> _Side:
    workers = stack.enter_context(
        Workers(plan.target, ranks=plan.ranks, threads=plan.threads, name=name, arguments=plan.arguments_of(name))
    )
    return _Side(name, workers, MemorySampler(workers.process_ids))


def _in_turn(sides: Sequence[_Side], index: int) -> list[_Side]:
    """Each block begins with another side, so that none always runs on the heels of the same one."""
    first = index % len(sides)
    return [*sides[first:], *sides[:first]]

"""Runs under a memory limit: who trains, and who dies.

The limit is the kernel's on a process's private memory (RLIMIT_DATA): what is asked for beyond it is refused, at once
and cleanly, as a machine without more memory would end the process. Linux only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scripts.comparison.worker import Step
from scripts.measuring.processes import Workers, WorkersFailed
from scripts.measuring.progress import say
from scripts.measuring.statistics import largest_relative_difference

TARGET = "scripts.comparison.worker:TrainingRun"
_STEP_TIMEOUT_SECONDS = 600.0
_OUT_OF_MEMORY = ("can't allocate memory", "cannot allocate memory", "memoryerror", "bad_alloc", "out of memory")


@dataclass(frozen=True)
class LimitedRun:
    """What became of a run: the losses of the steps it made, and the last line of the error that ended it."""

    name: str
    losses: tuple[float, ...]
    error: str | None

    @property
    def out_of_memory(self) -> bool:
        """Whether it ended because memory was refused."""
        return self.error is not None and any(text in self.error.lower() for text in _OUT_OF_MEMORY)

    def describe(self) -> str:
        """In a few words."""
        if self.error is None:
            return f"trains ({len(self.losses)} steps)"
        return "out of memory" if self.out_of_memory else f"failed: {self.error}"


@dataclass(frozen=True)
class Limited:
    """Runs with at most `limit_bytes` of private memory each; losses beside those without a limit."""

    limit_bytes: int
    runs: tuple[LimitedRun, ...]
    loss_difference: float
    """The largest relative difference to the losses without a limit, of runs that trained."""

    def as_json(self) -> dict[str, object]:
        """The entry in the file."""
        return {
            "limit_bytes": self.limit_bytes,
            "max_relative_loss_difference": self.loss_difference,
            "runs": [
                {"name": run.name, "losses": list(run.losses), "error": run.error, "out_of_memory": run.out_of_memory}
                for run in self.runs
            ],
        }


def train_under_limit(
    flags: Mapping[str, Sequence[str]],
    *,
    limit_bytes: int,
    expected: Sequence[float],
    steps: int,
    ranks: int = 1,
    threads: int,
) -> Limited:
    """Train each of `flags` (name: flags of `pretrain_moe.py`) for some steps in processes of `limit_bytes`.

    Args:
        flags: of `pretrain_moe.py`, by the run's name.
        limit_bytes: private memory of a process.
        expected: losses without a limit, of at least as many steps.
        steps: how many to make.
        ranks: processes of a run.
        threads: of each process.
    """
    found: list[LimitedRun] = []
    for name in flags:
        say(f"{name} with {limit_bytes / 2**20:,.0f} MiB of memory")
        found.append(_train(name, flags[name], limit_bytes=limit_bytes, steps=steps, ranks=ranks, threads=threads))
        say(f"{name}: {found[-1].describe()}")
    differences = [
        largest_relative_difference(run.losses, list(expected[: len(run.losses)])) for run in found if run.losses
    ]
    return Limited(limit_bytes, tuple(found), max(differences, default=0.0))


def _train(name: str, flags: Sequence[str], *, limit_bytes: int, steps: int, ranks: int, threads: int) -> LimitedRun:
    losses: list[float] = []
    arguments = {"flags": list(flags), "memory_limit_bytes": limit_bytes}
    try:
        with Workers(TARGET, ranks=ranks, threads=threads, name=name, arguments=arguments) as workers:
            for _ in range(steps):
                made: list[list[Step]] = workers.call("train", steps=1, timeout_seconds=_STEP_TIMEOUT_SECONDS)
                losses += [step.loss for step in made[0]]
    except WorkersFailed as error:
        return LimitedRun(name, tuple(losses), _reason(str(error)))
    return LimitedRun(name, tuple(losses), None)


def _reason(text: str) -> str:
    """The line of an error that says most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    about_memory = [line for line in lines if any(words in line.lower() for words in _OUT_OF_MEMORY)]
    return (about_memory or lines)[-1]

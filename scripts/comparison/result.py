"""What a comparison found, and its JSON."""

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.comparison.limited import Limited
from scripts.comparison.worker import Made, Step, Totals
from scripts.measuring.environment import Environment
from scripts.measuring.memory import MemorySample
from scripts.measuring.statistics import Summary, largest_relative_difference, paired_ratio, summarize

STOCK, MEGASCALE = "stock", "megascale"


def paged_name(budget: str) -> str:
    """Name of the MegaScale run under a device budget."""
    return f"{MEGASCALE} {budget}"


@dataclass(frozen=True)
class Run:
    """One side of a comparison. Blocks are the repetitions that took turns with those of the other side."""

    name: str
    made: Made
    warmup: tuple[Step, ...]
    """Steps of rank 0 before measuring, in order."""
    blocks: tuple[tuple[Step, ...], ...]
    """Measured steps of rank 0, in order."""
    sent_bytes_per_step: float
    """To other ranks, of all ranks together, mean over measured steps."""
    totals: tuple[Totals, ...]
    """By rank."""
    memory: tuple[MemorySample, ...]
    """Resident memory of all ranks over the run's own time."""
    validation_loss: float | None

    @property
    def steps(self) -> list[Step]:
        """Every step, in order."""
        return [*self.warmup, *(step for block in self.blocks for step in block)]

    @property
    def step_seconds(self) -> Summary:
        """Over every measured step."""
        return summarize([step.seconds for block in self.blocks for step in block])

    @property
    def block_seconds(self) -> list[float]:
        """The median step of each block."""
        return [summarize([step.seconds for step in block]).median for block in self.blocks]

    @property
    def tokens_per_second(self) -> float:
        """At the median step."""
        return self.made.tokens_per_step / self.step_seconds.median

    def total(self, name: str) -> int:
        """A counter of `Totals`, over all ranks."""
        return sum(int(getattr(totals, name)) for totals in self.totals)

    def as_json(self) -> dict[str, object]:
        """The run's entry in the file."""
        return {
            "name": self.name,
            "step_seconds_median": self.step_seconds.median,
            "tokens_per_second": self.tokens_per_second,
            "peak_rss_bytes": self.total("peak_rss_bytes"),
            "expert_state_resident_peak_bytes": self.total("expert_state_peak_bytes"),
            "page_faults": self.total("page_faults"),
            "bytes_read": self.total("bytes_read"),
            "bytes_written": self.total("bytes_written"),
            "collective_bytes": round(self.sent_bytes_per_step),
            "losses": [step.loss for step in self.steps],
            "grad_norms": [step.grad_norm for step in self.steps],
            "validation_loss": self.validation_loss,
            "experts": self.made.experts,
            "dispatcher": self.made.dispatcher,
            "optimizer": self.made.optimizer,
            "parameters": self.made.parameters,
            "measured_steps": sum(map(len, self.blocks)),
            "memory_over_time": [[round(s.seconds, 3), s.resident_bytes] for s in self.memory],
        }


@dataclass(frozen=True)
class Comparison:
    """Stock first, then MegaScale, then MegaScale under device budgets; what became of runs under a memory limit."""

    environment: Environment
    preset: str
    runs: tuple[Run, ...]
    limited: Limited | None = None

    def run(self, name: str) -> Run:
        """A run by name."""
        return next(run for run in self.runs if run.name == name)

    @property
    def others(self) -> tuple[Run, ...]:
        """All runs but stock's."""
        return tuple(run for run in self.runs if run.name != STOCK)

    @property
    def speed(self) -> Summary:
        """Stock's step time over MegaScale's, block by block: above 1 where MegaScale is faster."""
        return self.speed_of(MEGASCALE)

    def speed_of(self, name: str) -> Summary:
        """The same of another run."""
        return paired_ratio(self.run(STOCK).block_seconds, self.run(name).block_seconds)

    def total_ratio(self, counter: str, name: str = MEGASCALE) -> float:
        """A run's counter over stock's."""
        return self.run(name).total(counter) / self.run(STOCK).total(counter)

    @property
    def loss_difference(self) -> float:
        """The largest relative difference of two losses of one step, over all runs."""
        stock = [step.loss for step in self.run(STOCK).steps]
        return max(largest_relative_difference([step.loss for step in run.steps], stock) for run in self.others)

    @property
    def grad_norm_difference(self) -> float:
        """The same of gradient norms."""
        stock = _norms(self.run(STOCK).steps)
        return max(largest_relative_difference(_norms(run.steps), stock) for run in self.others)

    def ratios(self, name: str) -> dict[str, float]:
        """Speed (above 1 is faster), memory and expert state (below 1 is smaller) of a run against stock."""
        return {
            "speed": self.speed_of(name).median,
            "peak_rss": self.total_ratio("peak_rss_bytes", name),
            "expert_state": self.total_ratio("expert_state_peak_bytes", name),
        }

    def as_json(self) -> dict[str, object]:
        """The whole file. See docs: fields that count paging are 0 for stock, which has none."""
        return {
            "environment": self.environment,
            "preset": self.preset,
            "runs": [run.as_json() for run in self.runs],
            "ratios": self.ratios(MEGASCALE),
            "ratios_by_run": {run.name: self.ratios(run.name) for run in self.others},
            "max_relative_loss_difference": self.loss_difference,
            "max_relative_grad_norm_difference": self.grad_norm_difference,
            "under_memory_limit": None if self.limited is None else self.limited.as_json(),
        }


def _norms(steps: Sequence[Step]) -> list[float]:
    norms = [step.grad_norm for step in steps]
    if any(norm is None for norm in norms):
        raise RuntimeError("a step has no gradient norm")
    return [norm for norm in norms if norm is not None]

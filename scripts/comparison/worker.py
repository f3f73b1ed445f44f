"""One training run in a process of its own (one a rank); see `scripts.measuring.processes`."""

import resource
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.comparison.collectives import CollectiveCounter
from scripts.measuring.memory import peak_resident_bytes, private_bytes


@dataclass(frozen=True)
class Step:
    """One training step of one rank."""

    loss: float
    grad_norm: float | None
    seconds: float
    sent_bytes: int
    """To other ranks, see `collectives`."""


@dataclass(frozen=True)
class Made:
    """What a run is made of."""

    experts: str
    dispatcher: str
    optimizer: str
    tokens_per_step: int
    parameters: int


@dataclass(frozen=True)
class Totals:
    """What a rank used, at the end of its run."""

    peak_rss_bytes: int
    expert_state_peak_bytes: int
    page_faults: int
    bytes_read: int
    bytes_written: int
    peak_data_bytes: int = 0
    """Private memory that was asked for, touched or not: what a limit on it (RLIMIT_DATA) counts."""


class TrainingRun:
    """A trainer that is told step by step what to do. `flags`: of `pretrain_moe.py`.

    `memory_limit_bytes`: private memory that the process may ask for, from here on.
    """

    def __init__(self, rank: int, world: int, *, flags: Sequence[str], memory_limit_bytes: int | None = None) -> None:
        if memory_limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory_limit_bytes, memory_limit_bytes))
        self._data_peak = 0
        self._collectives = CollectiveCounter()
        self._collectives.install()
        from scripts.moe_trainer.arguments import parse_args
        from scripts.moe_trainer.trainer import Trainer

        self._trainer = Trainer(parse_args(list(flags), world_size=world))
        self._expert_state_peak = 0
        self._look_between_the_halves_of_a_step()
        self._look()

    def describe(self) -> Made:
        """Name the classes that run. A collective."""
        from scripts.moe_trainer.norms import count_parameters

        trainer = self._trainer
        return Made(
            experts=self._class_below(".mlp.experts"),
            dispatcher=self._dispatcher(),
            optimizer=_optimizer_name(trainer.optimizer),
            tokens_per_step=trainer.args.global_batch_size * trainer.args.seq_length,
            parameters=count_parameters(trainer.model),
        )

    def train(self, steps: int) -> list[Step]:
        """Make `steps` training steps."""
        made: list[Step] = []
        for _ in range(steps):
            sent = self._collectives.sent_bytes
            result = self._trainer.train_step()
            self._look()
            made.append(Step(result.loss, result.grad_norm, result.step_seconds, self._collectives.sent_bytes - sent))
        return made

    def validate(self) -> float:
        """The mean validation loss a token."""
        return self._trainer.evaluate()

    def totals(self) -> Totals:
        """Peaks and counters so far."""
        from megascale_omni.experts.overview import counters

        counts = counters(self._trainer.model) or {}
        return Totals(
            peak_rss_bytes=peak_resident_bytes(),
            expert_state_peak_bytes=self._expert_state_peak,
            page_faults=counts.get("page_faults", 0),
            bytes_read=counts.get("bytes_loaded", 0),
            bytes_written=counts.get("bytes_written", 0),
            peak_data_bytes=self._data_peak,
        )

    def _look_between_the_halves_of_a_step(self) -> None:
        """Gradient pages exist between backward and optimizer: there paged state is at its largest.

        Stock's state is as large at the end of a step, where looking at it costs no measured time.
        """
        from megascale_omni.experts.overview import managers

        if not managers(self._trainer.model):
            return
        step = self._trainer.optimizer_step

        def looked_at() -> object:
            self._look()
            return step()

        self._trainer.optimizer_step = looked_at  # type: ignore[method-assign, assignment]

    def _look(self) -> None:
        from scripts.comparison.expert_state import resident_expert_bytes

        held = resident_expert_bytes(self._trainer.model, self._trainer.optimizer)
        self._expert_state_peak = max(self._expert_state_peak, held)
        self._data_peak = max(self._data_peak, private_bytes())

    def _class_below(self, suffix: str) -> str:
        names = {
            type(module).__name__
            for chunk in self._trainer.model
            for name, module in chunk.named_modules()
            if name.endswith(suffix)
        }
        return " + ".join(sorted(names)) or "none"

    def _dispatcher(self) -> str:
        names = {
            type(module.token_dispatcher).__name__
            for chunk in self._trainer.model
            for module in chunk.modules()
            if getattr(module, "token_dispatcher", None) is not None
        }
        return " + ".join(sorted(names)) or "none"


def _optimizer_name(optimizer: object) -> str:
    """Stock's class, with the members of a chain and the optimizer inside."""
    members = getattr(optimizer, "chained_optimizers", None)
    if members is not None:
        return f"{type(optimizer).__name__}({', '.join(_optimizer_name(member) for member in members)})"
    inner = getattr(optimizer, "optimizer", None)
    return type(optimizer).__name__ + (f"[{type(inner).__name__}]" if inner is not None else "")

"""What a training iteration, and the optimizer in it, gave."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerResult:
    """What the optimizer said about one step. The same on every rank."""

    successful: bool
    grad_norm: float | None
    num_zeros: float | None


@dataclass(frozen=True)
class StepResult:
    """One training iteration. Loss and norms are of the whole batch and model, the same on every rank."""

    iteration: int
    """Counted from 1."""
    loss: float
    grad_norm: float | None
    num_zeros: float | None
    params_norm: float | None
    learning_rate: float
    """The one this step was made with."""
    skipped: bool
    step_seconds: float
    tokens: int
    """In the whole batch."""
    clip: dict[str, object] | None = None
    """What clipping by module found and did, where it is asked for."""

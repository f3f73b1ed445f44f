"""How a training step scales: micro-batches through a pipeline, as a pure function."""

from __future__ import annotations


def step_seconds(*, micro_batches: int, stages: int, micro_batch_seconds: float, chunks: int = 1) -> float:
    """A step of 1F1B: ``micro_batch_seconds`` is one micro-batch's forward and backward on one stage.

    The pipeline fills and drains once: ``(m + (p - 1) / v) t`` with ``v`` chunks a stage (Narayanan et al.: Efficient
    large-scale language model training on GPU clusters using Megatron-LM, 2021).

    Raises:
        ValueError: no micro-batches, stages or chunks.
    """
    if min(micro_batches, stages, chunks) < 1:
        raise ValueError(f"micro_batches={micro_batches}, stages={stages} and chunks={chunks} must be 1 or more")
    return (micro_batches + (stages - 1) / chunks) * micro_batch_seconds


def micro_batches_of(*, ranks: int, ranks_of_a_pipeline: int, batches: int) -> int:
    """Micro-batches of each pipeline where a step's ``batches`` are divided among ``ranks / ranks_of_a_pipeline``.

    Raises:
        ValueError: one cannot be divided by the other.
    """
    pipelines = ranks // ranks_of_a_pipeline if ranks_of_a_pipeline else 0
    if not pipelines or ranks % ranks_of_a_pipeline or batches % pipelines:
        raise ValueError(
            f"{batches} micro-batches cannot be divided among pipelines of {ranks_of_a_pipeline} of {ranks} ranks; "
            "choose divisors"
        )
    return batches // pipelines

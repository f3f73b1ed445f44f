"""A run from the first iteration to the last: training, validation, checkpoints, and a record of each."""

import argparse
import platform
import time

import megatron.core
import torch

from megascale_omni.experts.overview import Overview, counters
from megascale_omni.groups.dispatch import GroupDispatcher, total_stats

from .errors import UsageError
from .metrics import (
    JsonLines,
    Metrics,
    PlainLines,
    ProgressBar,
    Sink,
    TensorBoard,
    peak_resident_bytes,
    resident_bytes,
    wants_progress_bar,
)
from .norms import count_parameters
from .trainer import StepResult, Trainer


def train(args: argparse.Namespace) -> None:
    """Run `args` from where it stands to `--train-iters` (or `--exit-interval`), and write down how it went.

    Raises:
        UsageError: as `Trainer`.
        RuntimeError: of stock, such as the one for a loss that is not finite. The end record names it.
    """
    started = time.perf_counter()
    with Trainer(args) as trainer, Metrics(_sinks(trainer)) as metrics:
        metrics.write(**_start_record(trainer), setup_seconds=round(time.perf_counter() - started, 3))
        reason = "unknown"
        try:
            reason = _iterate(trainer, metrics)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            moved = counters(trainer.model)
            metrics.write(event="end", reason=reason, peak_rss_bytes=peak_resident_bytes(), paging=moved)
            raise
        metrics.write(
            event="end",
            reason=reason,
            peak_rss_bytes=_peak_over_ranks(trainer),
            paging=counters(trainer.model),
            groups=_groups(trainer),
        )


def _iterate(trainer: Trainer, metrics: Metrics) -> str:
    """Returns why it ended."""
    args = trainer.args
    evaluated = saved = trainer.iteration
    reason = "train_iters"
    while trainer.iteration < args.train_iters:
        metrics.write(**step_record(trainer.train_step()))
        iteration = trainer.iteration
        if args.eval_interval is not None and iteration % args.eval_interval == 0:
            _validate(trainer, metrics)
            evaluated = iteration
        if args.save_interval is not None and iteration % args.save_interval == 0:
            _save(trainer, metrics)
            saved = iteration
        if args.exit_interval is not None and iteration % args.exit_interval == 0:
            reason = "exit_interval"
            break
    if args.eval_interval is not None and args.eval_iters > 0 and evaluated != trainer.iteration:
        _validate(trainer, metrics)
    if args.save is not None and saved != trainer.iteration:
        _save(trainer, metrics)
    trainer.finish_saves()
    return reason


def step_record(step: StepResult) -> dict[str, object]:
    """Return the JSON record of one iteration."""
    record: dict[str, object] = {
        "event": "step",
        "iteration": step.iteration,
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "num_zeros": step.num_zeros,
        "params_norm": step.params_norm,
        "lr": step.learning_rate,
        "skipped": step.skipped,
        "step_seconds": step.step_seconds,
        "tokens_per_second": step.tokens / step.step_seconds,
        "rss_bytes": resident_bytes(),
    }
    return record if step.clip is None else {**record, "clip": step.clip}


def _validate(trainer: Trainer, metrics: Metrics) -> None:
    if trainer.args.eval_iters < 1:
        return
    start = time.perf_counter()
    loss = trainer.evaluate()
    seconds = time.perf_counter() - start
    metrics.write(event="validation", iteration=trainer.iteration, loss=loss, seconds=seconds)


def _save(trainer: Trainer, metrics: Metrics) -> None:
    start = time.perf_counter()
    folder = trainer.save()
    metrics.write(event="checkpoint", iteration=trainer.iteration, folder=folder, seconds=time.perf_counter() - start)


def _start_record(trainer: Trainer) -> dict[str, object]:
    args = trainer.args
    experts, dispatcher = experts_and_dispatcher(trainer)
    overview = Overview.of(trainer.model)
    return {
        "event": "start",
        "argv": args.argv,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "megatron-core": megatron.core.__version__,
        },
        "megascale": bool(args.megascale),
        "device": str(trainer.distributed.device),
        "threads": torch.get_num_threads(),
        "experts_class": experts,
        "dispatcher": dispatcher,
        "optimizer": type(trainer.optimizer).__name__,
        "optimizers": [type(member).__name__ for member in getattr(trainer.optimizer, "chained_optimizers", [])],
        "world": args.world_size,
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        "data_parallel_size": args.data_parallel_size,
        "params": count_parameters(trainer.model),
        "train_samples": len(trainer.data.train),
        "tokens_per_step": args.global_batch_size * args.seq_length,
        "paging": None if overview is None else overview.record(),
        "iteration": trainer.iteration,
        "rss_bytes": resident_bytes(),
    }


def experts_and_dispatcher(trainer: Trainer) -> tuple[str | None, str | None]:
    """Return the class names of the first MoE layer's experts and token dispatcher; None for a dense model or stage."""
    for chunk in trainer.model:
        for module in chunk.modules():
            if hasattr(module, "experts") and hasattr(module, "token_dispatcher"):
                return type(module.experts).__name__, type(module.token_dispatcher).__name__
    return None, None


def _groups(trainer: Trainer) -> dict[str, float] | None:
    """What the groups dispatchers of this rank did since the start; None where there are none."""
    modules = (module for chunk in trainer.model for module in chunk.modules())
    found = (getattr(getattr(module, "token_dispatcher", None), "core", None) for module in modules)
    return total_stats(core.stats() for core in found if isinstance(core, GroupDispatcher))


def _peak_over_ranks(trainer: Trainer) -> int:
    peak = torch.tensor(peak_resident_bytes(), dtype=torch.int64, device=trainer.distributed.device)
    torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
    return int(peak)


def _sinks(trainer: Trainer) -> list[Sink]:
    args = trainer.args
    trainer.distributed.agree(lambda: None)  # every rank got this far: what follows prints and writes
    if not trainer.is_first_rank:
        return []
    sinks: list[Sink] = []
    try:
        if args.metrics_jsonl is not None:
            sinks.append(JsonLines(args.metrics_jsonl, append=trainer.iteration > 0))
        if args.tensorboard_dir is not None:
            sinks.append(TensorBoard(args.tensorboard_dir))
    except OSError as error:
        raise UsageError(f"metrics cannot be written: {error}") from error
    if wants_progress_bar() and not args.no_progress:
        sinks.append(ProgressBar(first=trainer.iteration, last=args.train_iters))
    else:
        sinks.append(PlainLines(interval=args.log_interval, last=args.train_iters))
    return sinks

"""Small training runs inside the ranks of a pool. Imported by functions that ranks run, not by tests."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    import torch

    from megatron_ext.experts import MegaScaleExperts
    from scripts.moe_trainer.trainer import Trainer

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 --num-experts 4 --moe-router-topk 2 "
    "--seq-length 16 --micro-batch-size 2 --global-batch-size 8 --moe-aux-loss-coeff 0.01 "
    "--lr 1e-3 --min-lr 1e-5 --lr-warmup-iters 3 --lr-decay-style cosine --train-iters 20 --split 100 "
    "--weight-decay-incr-style linear --start-weight-decay 0.05 --end-weight-decay 0.3"
)
GATED = "--swiglu --disable-bias-linear"
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
EXPERT_PARALLEL = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
DISTRIBUTED_OPTIMIZER = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"


def write_corpus(folder: Path) -> str:
    """A text in no order; returns its path."""
    words = (
        "the quick",
        "brown fox",
        "jumps",
        "over",
        "a lazy dog",
        "and then",
        "sleeps",
        "under an",
        "old oak",
        "tree",
    )
    path = folder / "corpus.txt"
    path.write_text(" ".join(words[(i * i + i // 7) % len(words)] for i in range(10_000)))
    return str(path)


def flags(corpus: str, *options: str, megascale: bool = False) -> list[str]:
    """The trainer's flags: the model above, what ``options`` (strings of flags) change, ``--megascale``."""
    words = " ".join([MODEL, *options]).split()
    return [*words, "--data-path", corpus, *(["--megascale"] if megascale else [])]


def trainer(corpus: str, *options: str, megascale: bool = False) -> Trainer:
    """A trainer; use it as a context manager."""
    spare_the_collector_what_was_imported()
    from scripts.moe_trainer.arguments import parse_args
    from scripts.moe_trainer.trainer import Trainer

    return Trainer(parse_args(flags(corpus, *options, megascale=megascale)))


@functools.cache
def spare_the_collector_what_was_imported() -> None:
    """Stock collects garbage when it saves and loads, and ranks after every run: not all of torch each time."""
    gc.collect()
    gc.freeze()


def paged_modules(run: Trainer) -> list[MegaScaleExperts]:
    """The paged experts of this rank, in the order of its layers."""
    return [module for chunk in run.model for module in chunk.paged_experts]


@contextmanager
def changed_experts(change: Callable[[torch.nn.Module, int], None]) -> Iterator[None]:
    """Trainers built meanwhile call ``change(experts module, index)`` before they wrap a chunk for data parallelism."""
    from scripts.moe_trainer import model

    build = model._build_chunk

    def build_and_change(*arguments: Any) -> Any:
        chunk = build(*arguments)
        experts = [module for name, module in chunk.named_modules() if name.endswith("mlp.experts")]
        for index, module in enumerate(experts):
            change(module, index)
        return chunk

    with mock.patch.object(model, "_build_chunk", build_and_change):
        yield


@contextmanager
def expert_overrides(override: dict[str, float]) -> Iterator[None]:
    """Trainers built meanwhile give experts' weights settings of their own, as a user of Megatron-Core would."""
    from megatron.core import optimizer
    from megatron.core.optimizer.optimizer_config import ParamKey

    standard = optimizer.get_standard_config_overrides

    def with_experts(config: object) -> dict[Any, Any]:
        return {**standard(config), ParamKey(name="*experts*weight"): override}

    with mock.patch.object(optimizer, "get_standard_config_overrides", with_experts):
        yield


def losses(run: Trainer, steps: int) -> list[float]:
    """The losses of the next steps."""
    return [run.train_step().loss for _ in range(steps)]


def losses_and_norms(run: Trainer, steps: int) -> list[tuple[float, float | None]]:
    """Losses and gradient norms of the next steps."""
    results = [run.train_step() for _ in range(steps)]
    return [(result.loss, result.grad_norm) for result in results]


def largest_relative_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """The largest of |a - b| / |a|."""
    assert len(first) == len(second)
    return max(abs(a - b) / abs(a) for a, b in zip(first, second, strict=True))

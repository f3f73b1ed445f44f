"""Micro-batches from the corpus, as the model takes them.

Shapes: b micro-batch size, L sequence length.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .corpus import Samples, ShuffledOrder, micro_batch_positions, read_corpus, split_corpus
from .errors import UsageError


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank, each [b, L]."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor


class BatchSource:
    """Training and validation batches of one data-parallel rank: functions of seed and position alone.

    Raises:
        UsageError: the corpus is missing, unreadable or too short.
    """

    def __init__(self, args: argparse.Namespace, *, data_parallel_rank: int, device: torch.device) -> None:
        validate = args.eval_interval is not None and args.eval_iters > 0
        corpus = read_corpus(args.data_path)
        self.train, self.valid = split_corpus(corpus, args.split, sequence_length=args.seq_length, validate=validate)
        self._args, self._rank, self._device = args, data_parallel_rank, device
        self._order = ShuffledOrder(len(self.train), args.seed)
        self._causal_mask: torch.Tensor | None = None

    def training(self, consumed_samples: int) -> Iterator[Batch]:
        """Yield this rank's micro-batches of the step that starts after `consumed_samples` of all ranks."""
        return self._batches(self.train, lambda position: self._order[position], consumed_samples)

    def validation(self, index: int) -> Iterator[Batch]:
        """Yield this rank's micro-batches of the `index`-th validation batch; the range is repeated as needed.

        Raises:
            UsageError: no validation was asked for.
        """
        samples = self.valid
        if samples is None:
            raise UsageError("there is no validation data: give --eval-interval and a --split with a validation part")
        return self._batches(samples, lambda position: position % len(samples), index * self._args.global_batch_size)

    def _batches(self, samples: Samples, window: Callable[[int], int], consumed: int) -> Iterator[Batch]:
        length = self._args.seq_length
        for micro_batch in range(self._args.num_microbatches):
            positions = micro_batch_positions(
                consumed=consumed,
                micro_batch=micro_batch,
                micro_batch_size=self._args.micro_batch_size,
                data_parallel_rank=self._rank,
                data_parallel_size=self._args.data_parallel_size,
            )
            windows = torch.from_numpy(samples.windows([window(position) for position in positions]))
            windows = windows.to(self._device)
            yield Batch(
                tokens=windows[:, :-1].contiguous(),
                labels=windows[:, 1:].contiguous(),
                loss_mask=torch.ones(len(windows), length, device=self._device),
                position_ids=torch.arange(length, device=self._device).expand(len(windows), length),
            )

    def attention_mask(self) -> torch.Tensor | None:
        """[1, 1, L, L], True where a query may not look; None for Transformer Engine, which makes its own."""
        if self._args.transformer_impl == "transformer_engine":
            return None
        if self._causal_mask is None:
            length = self._args.seq_length
            ones = torch.ones(1, 1, length, length, dtype=torch.bool, device=self._device)
            self._causal_mask = torch.triu(ones, diagonal=1)
        return self._causal_mask

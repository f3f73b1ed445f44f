"""Gradients that DeepSpeed's optimizers hold at a step: whose they are, and what multiplies them.

Every optimizer of DeepSpeed clips inside its own step, by one norm. Each class of :class:`DenseGradients` gives the
pieces of gradients that one kind of them holds on this rank, and lets a :class:`Verdict` decide in the place where the
optimizer would look for overflow or take its norm: all of a step's gradients are reduced by then, and none has been
used.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_ext.gradient_limits import DenseGradients, Limit, Verdict
from deepspeed_ext.zero_gradients import Zero1And2Gradients, Zero3Gradients
from megascale_omni.bulk import Factor
from megascale_omni.clipping import GradientPart


class _Whole(DenseGradients):
    """Optimizers without ZeRO: every rank has all gradients."""

    @abstractmethod
    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gradients with their parameters' names."""

    def parts(self) -> Iterator[GradientPart]:
        """See :class:`DenseGradients`."""
        share = 1.0 / dist.get_world_size()
        for name, gradient in self._named():
            yield GradientPart(name, gradient, share)


class Bf16Gradients(_Whole):
    """``BF16_Optimizer``: sums in fp32 (or as ``grad_accum_dtype`` says), whole on every rank."""

    def __init__(self, optimizer: Any, names: Mapping[int, str]) -> None:  # noqa: ANN401
        super().__init__(optimizer, names)
        self._stock_gradients: Callable[..., Any] = optimizer.get_grads_for_norm
        self._device = optimizer.fp32_groups_flat_partition[0].device

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        optimizer = self._optimizer
        for number, group in enumerate(optimizer.bf16_groups):
            for place, parameter in enumerate(group):
                if optimizer.fp32_groups_has_gradients[number][place]:
                    yield self._names[id(parameter)], optimizer.fp32_groups_gradients[number][place]

    def norm_with(self, experts: float) -> float:
        """See :class:`DenseGradients`."""
        from deepspeed.runtime.utils import get_global_norm_of_tensors

        dense, _ = self._stock_gradients()
        found = [*dense, torch.tensor([experts], device=self._device)]
        norm = float(get_global_norm_of_tensors(found))
        return norm if norm >= 0 else math.inf

    def factor(self, limit: Limit) -> Factor:
        """See :class:`DenseGradients`."""
        return torch.clamp(limit.threshold / (torch.tensor(limit.norm, dtype=torch.float32) + 1e-6), max=1.0)

    def install(self, verdict: Verdict) -> None:
        """Its norm is that of a list of tensors: one number is given instead. What it would clip is clipped by then."""
        optimizer = self._optimizer

        def get_grads_for_norm(for_clipping: bool = False) -> Any:  # noqa: ANN401 - stock's
            if for_clipping:
                return []
            left_out = verdict.decide()
            if not left_out:
                self.apply(verdict, self._named())
            return [torch.tensor([math.nan if left_out else verdict.norm], device=self._device)], {}

        optimizer.get_grads_for_norm = get_grads_for_norm


class UnfusedGradients(_Whole):
    """``FP16_UnfusedOptimizer``, which trains bf16 without ZeRO."""

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        for group in self._optimizer.fp16_groups:
            for parameter in group:
                if parameter.grad is not None:
                    yield self._names[id(parameter)], parameter.grad

    def norm_with(self, experts: float) -> float:
        """See :class:`DenseGradients`."""
        from deepspeed.runtime.utils import get_global_norm, get_weight_norm

        groups = [[p.grad for p in group if p.grad is not None] for group in self._optimizer.fp16_groups]
        norm = float(get_global_norm(norm_list=[get_weight_norm(found) for found in groups if found]))
        return math.hypot(norm, experts) if norm >= 0 else math.inf

    def factor(self, limit: Limit) -> Factor:
        """See :class:`DenseGradients`."""
        return 1.0 / max(1.0, (limit.norm + 1e-6) / limit.threshold)

    def install(self, verdict: Verdict) -> None:
        """See :class:`DenseGradients`."""
        optimizer = self._optimizer

        def check(param_groups: object = None) -> bool:
            return verdict.decide()

        def unscale_and_clip_grads(total_norm: object, apply_scale: bool = True) -> float:
            optimizer._global_grad_norm = verdict.norm
            pairs = (
                (self._names[id(half)], master.grad)
                for halves, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
                for half, master in zip(halves, masters, strict=True)
            )
            self.apply(verdict, pairs)
            return 1.0

        optimizer.overflow_checker.check = check
        optimizer.unscale_and_clip_grads = unscale_and_clip_grads


class PlainGradients(_Whole):
    """A torch optimizer, which trains fp32 without ZeRO: it asks nobody, so that its ``step`` does."""

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield self._names[id(parameter)], parameter.grad

    def norm_with(self, experts: float) -> float:
        """As :meth:`deepspeed_ext.norms.SharedNorm.clip_plain`."""
        norms = [gradient.detach().float().norm(2) for _, gradient in self._named()]
        norms.append(torch.tensor(experts, device=norms[0].device if norms else "cpu"))
        return float(torch.stack(norms).pow(2).sum().pow(0.5))

    def factor(self, limit: Limit) -> Factor:
        """See :class:`DenseGradients`."""
        return torch.clamp(limit.threshold / (torch.tensor(limit.norm, dtype=torch.float32) + 1e-6), max=1.0)

    def install(self, verdict: Verdict) -> None:
        """``overflow`` is where DeepSpeed's engine looks whether a step was left out."""
        optimizer = self._optimizer
        stock_step: Callable[..., Any] = optimizer.step

        def step(_: object, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - stock's signature
            optimizer.overflow = verdict.decide()
            if optimizer.overflow:
                return None
            self.apply(verdict, self._named())
            return stock_step(*args, **kwargs)

        optimizer.step = MethodType(step, optimizer)  # a method, because schedulers wrap `step.__func__`


def dense_gradients(optimizer: Any, names: Mapping[int, str]) -> DenseGradients:  # noqa: ANN401
    """The gradients of the optimizer that DeepSpeed has made.

    Raises:
        ValueError: one that is not known.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    kinds: dict[type, type[DenseGradients]] = {
        DeepSpeedZeroOptimizer: Zero1And2Gradients,
        DeepSpeedZeroOptimizer_Stage3: Zero3Gradients,
        BF16_Optimizer: Bf16Gradients,
        FP16_UnfusedOptimizer: UnfusedGradients,
    }
    found = kinds.get(type(optimizer))
    if found is not None:
        return found(optimizer, names)
    if isinstance(optimizer, torch.optim.Optimizer):
        return PlainGradients(optimizer, names)
    raise ValueError(
        f"DeepSpeed chose {type(optimizer).__name__} for this configuration, which is not supported with megascale; "
        'use a ZeRO stage from 1 to 3, or "torch_adam": true in the optimizer\'s params'
    )

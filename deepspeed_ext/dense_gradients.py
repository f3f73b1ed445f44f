"""Gradients that DeepSpeed's optimizers hold at a step: whose they are, and what multiplies them.

Every optimizer of DeepSpeed clips inside its own step, by one norm. Each class here gives the pieces of gradients that
one kind of them holds on this rank, and lets a :class:`Verdict` decide in the place where the optimizer would look for
overflow or take its norm: all of a step's gradients are reduced by then, and none has been used. Multiplying is done
where the optimizer does it, in its own formula and dtype, so that one module is clipped to the bit as stock clips.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megascale_omni.bulk import Bulk, Factor, bulk_for
from megascale_omni.clipping import GradientPart


@dataclass(frozen=True)
class Limit:
    """A norm, and what it is to be clipped to."""

    norm: float
    threshold: float


class Verdict(Protocol):
    """Who decides about a step."""

    norm: float
    """Of the whole gradient, as it was last decided about; not finite where the step is left out."""

    def decide(self) -> bool:
        """Whether the step at hand is left out. A collective, once a step."""
        ...

    def limit(self, parameter: str) -> Limit | None:
        """What the last decision says of a parameter's gradient; None where it stays as it is."""
        ...


@dataclass(frozen=True)
class _Piece:
    """A run of elements of a flat gradient that belong to one parameter."""

    name: str
    start: int
    length: int


class DenseGradients(ABC):
    """One optimizer's gradients. ``names``: of the model's parameters, by id.

    ``bulk`` multiplies them (None: chosen by device).
    """

    bulk: Bulk | None = None

    def __init__(self, optimizer: Any, names: Mapping[int, str]) -> None:  # noqa: ANN401 - DeepSpeed's have no base
        self._optimizer = optimizer
        self._names = dict(names)

    @abstractmethod
    def parts(self) -> Iterator[GradientPart]:
        """What this rank holds, once all gradients of a step are reduced."""

    @abstractmethod
    def norm_with(self, experts: float) -> float:
        """Stock's norm, joined by that of the experts, in the optimizer's own arithmetic. A collective."""

    @abstractmethod
    def factor(self, limit: Limit) -> Factor:
        """What the optimizer multiplies by to clip; 1 or less."""

    @abstractmethod
    def install(self, verdict: Verdict) -> None:
        """From now on the optimizer asks ``verdict``."""

    def _apply(self, verdict: Verdict, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._multiply((gradient, verdict.limit(name)) for name, gradient in named)

    def _multiply(self, limited: Iterable[tuple[torch.Tensor, Limit | None]]) -> None:
        """All at once, and without a pass over gradients that stay as they are."""
        groups: dict[Limit, list[torch.Tensor]] = {}
        for gradient, limit in limited:
            if limit is not None:
                groups.setdefault(limit, []).append(gradient)
        factors = {limit: self.factor(limit) for limit in groups}
        small = [limit for limit, factor in factors.items() if float(factor) < 1.0]
        if small:
            bulk = self.bulk or bulk_for(groups[small[0]][0].device)
            bulk.scale([groups[limit] for limit in small], [factors[limit] for limit in small])

    def _apply_to(self, verdict: Verdict, flat: torch.Tensor, pieces: list[_Piece]) -> None:
        """One product for each run of pieces with the same limit."""
        runs: list[tuple[torch.Tensor, Limit | None]] = []
        start = stop = 0
        current: Limit | None = None
        for piece in [*pieces, _Piece("", flat.numel(), 0)]:
            limit = verdict.limit(piece.name) if piece.name else None
            if piece.start != stop or limit != current:
                runs.append((flat.narrow(0, start, stop - start), current))
                start, current = piece.start, limit
            stop = piece.start + piece.length
        self._multiply(runs)


class _Zero(DenseGradients):
    """What the optimizers of ZeRO 1 to 3 share: flat fp32 gradients, one shard a rank."""

    norm_dtype = torch.float32

    def factor(self, limit: Limit) -> Factor:
        """The reciprocal of a factor that is at least 1, in the dtype of the optimizer's norm."""
        norm = torch.tensor(limit.norm, dtype=self.norm_dtype)
        return 1.0 / torch.clamp((norm + 1e-6) / limit.threshold, min=1.0)


class Zero1And2Gradients(_Zero):
    """``DeepSpeedZeroOptimizer``, with its optimizer on the device or on the CPU."""

    def __init__(self, optimizer: Any, names: Mapping[int, str]) -> None:  # noqa: ANN401
        super().__init__(optimizer, names)
        self._stock_norm: Callable[[], torch.Tensor] = optimizer.scaled_global_norm
        self._pieces: list[list[_Piece]] = []

    def parts(self) -> Iterator[GradientPart]:
        """See :class:`DenseGradients`."""
        groups = range(len(self._optimizer.bit16_groups))
        self._pieces = [[] for _ in groups]
        for group in groups:
            found = self._of_offloaded(group) if self._optimizer.cpu_offload else self._of_partition(group)
            for piece, gradient in found:
                self._pieces[group].append(piece)
                yield GradientPart(piece.name, gradient)

    def _of_offloaded(self, group: int) -> Iterator[tuple[_Piece, torch.Tensor]]:
        flat = self._optimizer.single_partition_of_fp32_groups[group].grad
        if flat is None:
            return
        for parameter in self._optimizer.params_in_partition[group]:
            _, _, start, length = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
            piece = _Piece(self._names[id(parameter)], start, length)
            yield piece, flat.view(-1).narrow(0, start, length)

    def _of_partition(self, group: int) -> Iterator[tuple[_Piece, torch.Tensor]]:
        parameters = iter(self._optimizer.params_in_partition[group])
        start = 0
        for gradient in self._optimizer.averaged_gradients.get(group) or ():
            if not getattr(gradient, "_zero_padding", False):
                parameter = next(parameters, None)
                if parameter is None:  # what is left is padding
                    return
                yield _Piece(self._names[id(parameter)], start, gradient.numel()), gradient
            start += gradient.numel()

    def norm_with(self, experts: float) -> float:
        """See :class:`DenseGradients`."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        dense = self._stock_norm()
        return float(combine_grad_norm_groups([dense, torch.tensor(experts, device=dense.device)]))

    def install(self, verdict: Verdict) -> None:
        """See :class:`DenseGradients`."""
        optimizer = self._optimizer

        def check_overflow(partition_gradients: bool = True) -> None:
            optimizer.overflow = verdict.decide()

        def scaled_global_norm(norm_type: int = 2) -> torch.Tensor:
            return torch.tensor(verdict.norm, dtype=torch.float32, device=optimizer.device)

        def unscale_and_clip_grads(grad_groups_flat: list[torch.Tensor], total_norm: object) -> None:
            for flat in grad_groups_flat:
                owners = [p.grad is flat for p in optimizer.single_partition_of_fp32_groups]
                self._apply_to(verdict, flat, self._pieces[owners.index(True)])

        optimizer.check_grad_overflow = True  # bf16 may do without
        optimizer.check_overflow = check_overflow
        optimizer.scaled_global_norm = scaled_global_norm
        optimizer.unscale_and_clip_grads = unscale_and_clip_grads


class Zero3Gradients(_Zero):
    """``DeepSpeedZeroOptimizer_Stage3``, with its optimizer on the device, on the CPU or on NVMe."""

    def __init__(self, optimizer: Any, names: Mapping[int, str]) -> None:  # noqa: ANN401
        super().__init__(optimizer, names)
        from deepspeed.runtime.zero.utils import get_norm_dtype

        self.norm_dtype = get_norm_dtype()
        self._stock_norms: Callable[[], list[torch.Tensor]] = optimizer._get_norm_groups
        self._pieces: list[list[_Piece]] = []

    def parts(self) -> Iterator[GradientPart]:
        """See :class:`DenseGradients`. Partitions are padded at their end; the padding is no element."""
        optimizer = self._optimizer
        self._pieces = [[] for _ in optimizer.fp16_groups]
        for number, group in enumerate(optimizer.fp16_groups):
            gradients = self._of_group(number)
            for place, parameter in enumerate(group):
                _, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
                piece = _Piece(self._names[id(parameter)], start, length)
                self._pieces[number].append(piece)
                before = optimizer._get_param_partition_rank(parameter) * parameter.partition_numel()
                real = max(0, min(length, parameter.ds_numel - before))
                if real:
                    yield GradientPart(piece.name, gradients(place, piece).reshape(-1).narrow(0, 0, real))

    def _of_group(self, number: int) -> Callable[[int, _Piece], torch.Tensor]:
        """Gradients of a sub-group, by place in it: those that will be stepped, or what these were copied from."""
        optimizer = self._optimizer
        if not optimizer.offload_optimizer:
            averaged = optimizer.averaged_gradients[number]
            return lambda place, piece: averaged[place]
        if optimizer._swappable_optimizer_subgroup(number):
            copied = getattr(optimizer, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition")  # noqa: B009
            group = optimizer.fp16_groups[number]
            return lambda place, piece: copied[group[place].ds_id]
        flat = optimizer.fp32_partitioned_groups_flat[number].grad
        return lambda place, piece: flat.narrow(0, piece.start, piece.length)

    def norm_with(self, experts: float) -> float:
        """See :class:`DenseGradients`."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        dense = self._stock_norms()
        return float(combine_grad_norm_groups([*dense, torch.tensor(experts, device=dense[0].device)]))

    def install(self, verdict: Verdict) -> None:
        """See :class:`DenseGradients`."""
        optimizer = self._optimizer
        device = optimizer.device

        def norm_groups() -> list[torch.Tensor]:
            norm = math.nan if verdict.decide() else verdict.norm
            return [torch.tensor(norm, dtype=torch.float32, device=device)]

        def unscale_and_clip_grads(sub_group_id: int, total_norm: object) -> None:
            flat = optimizer.fp32_partitioned_groups_flat[sub_group_id].grad
            self._apply_to(verdict, flat, self._pieces[sub_group_id])

        optimizer._get_norm_groups = norm_groups
        optimizer.unscale_and_clip_grads = unscale_and_clip_grads


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
                self._apply(verdict, self._named())
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
            self._apply(verdict, pairs)
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
            self._apply(verdict, self._named())
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

"""Dense gradients of DeepSpeed's ZeRO optimizers, stages 1 to 3: flat shards, one a rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from deepspeed_ext.gradient_limits import DenseGradients, Limit, Piece, Verdict
from megascale_omni.bulk import Factor
from megascale_omni.clipping import GradientPart


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
        self._pieces: list[list[Piece]] = []

    def parts(self) -> Iterator[GradientPart]:
        """See :class:`DenseGradients`."""
        groups = range(len(self._optimizer.bit16_groups))
        self._pieces = [[] for _ in groups]
        for group in groups:
            found = self._of_offloaded(group) if self._optimizer.cpu_offload else self._of_partition(group)
            for piece, gradient in found:
                self._pieces[group].append(piece)
                yield GradientPart(piece.name, gradient)

    def _of_offloaded(self, group: int) -> Iterator[tuple[Piece, torch.Tensor]]:
        flat = self._optimizer.single_partition_of_fp32_groups[group].grad
        if flat is None:
            return
        for parameter in self._optimizer.params_in_partition[group]:
            _, _, start, length = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
            piece = Piece(self._names[id(parameter)], start, length)
            yield piece, flat.view(-1).narrow(0, start, length)

    def _of_partition(self, group: int) -> Iterator[tuple[Piece, torch.Tensor]]:
        parameters = iter(self._optimizer.params_in_partition[group])
        start = 0
        for gradient in self._optimizer.averaged_gradients.get(group) or ():
            if not getattr(gradient, "_zero_padding", False):
                parameter = next(parameters, None)
                if parameter is None:  # what is left is padding
                    return
                yield Piece(self._names[id(parameter)], start, gradient.numel()), gradient
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
                self.apply_to(verdict, flat, self._pieces[owners.index(True)])

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
        self._pieces: list[list[Piece]] = []

    def parts(self) -> Iterator[GradientPart]:
        """See :class:`DenseGradients`. Partitions are padded at their end; the padding is no element."""
        optimizer = self._optimizer
        self._pieces = [[] for _ in optimizer.fp16_groups]
        for number, group in enumerate(optimizer.fp16_groups):
            gradients = self._of_group(number)
            for place, parameter in enumerate(group):
                _, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
                piece = Piece(self._names[id(parameter)], start, length)
                self._pieces[number].append(piece)
                before = optimizer._get_param_partition_rank(parameter) * parameter.partition_numel()
                real = max(0, min(length, parameter.ds_numel - before))
                if real:
                    yield GradientPart(piece.name, gradients(place, piece).reshape(-1).narrow(0, 0, real))

    def _of_group(self, number: int) -> Callable[[int, Piece], torch.Tensor]:
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
            self.apply_to(verdict, flat, self._pieces[sub_group_id])

        optimizer._get_norm_groups = norm_groups
        optimizer.unscale_and_clip_grads = unscale_and_clip_grads

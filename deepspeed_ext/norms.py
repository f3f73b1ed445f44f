"""One gradient norm, and one clip coefficient, over DeepSpeed's part and the pages.

DeepSpeed's optimizers take the norm of what they hold inside their own step. Each is given the pages' norm at the place
where it combines those of its groups; what it clips by then holds for both parts. Formulas are those of the optimizer
at hand, in its own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from megascale_omni.bulk import Bulk, bulk_for


class SharedNorm:
    """The pages' norm of the step at hand, handed to a DeepSpeed optimizer.

    Args:
        optimizer: DeepSpeed's, as the engine holds it. max_norm: ``gradient_clipping``; 0 for none. bulk: multiplies
        gradients of a plain optimizer (None: chosen by device).

    Raises:
        ValueError: an optimizer that is not known.
    """

    def __init__(self, optimizer: Any, *, max_norm: float, bulk: Bulk | None = None) -> None:  # noqa: ANN401
        self.max_norm = max_norm
        self.bulk = bulk
        self.experts = 0.0
        """Norm of all experts' gradients, the same on every rank; may be infinite or NaN."""
        self.total: float | None = None
        """Norm over both parts, where it is not the optimizer that keeps it."""
        self._optimizer = optimizer
        self._coefficient = _install(self, optimizer)

    def coefficient(self) -> float | None:
        """What the applied step multiplied gradients by; None where it left them as they were."""
        if self.max_norm <= 0.0:
            return None
        coefficient = self._coefficient()
        return coefficient if coefficient < 1.0 or math.isnan(coefficient) else None

    def clip_plain(self, parameters: list[torch.nn.Parameter]) -> None:
        """Clips parameters of a plain torch optimizer, as ``deepspeed.runtime.utils.clip_grad_norm_`` does."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        norms = [gradient.detach().float().norm(2) for gradient in gradients]
        norms.append(torch.tensor(self.experts, device=norms[0].device if norms else None))
        total = torch.stack(norms).pow(2).sum().pow(0.5)
        self.total = float(total)
        self._plain = torch.clamp(self.max_norm / (total + 1e-6), max=1.0)
        if gradients:
            (self.bulk or bulk_for(gradients[0].device)).scale([gradients], [self._plain])

    def plain_coefficient(self) -> float:
        """Of the last :meth:`clip_plain`."""
        return float(self._plain)


def _install(norm: SharedNorm, optimizer: Any) -> Callable[[], float]:  # noqa: ANN401
    """Lets ``optimizer`` count the pages in; returns what gives the coefficient after its step."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if type(optimizer) is DeepSpeedZeroOptimizer:
        _install_stage_1_and_2(norm, optimizer)
        return lambda: _zero_coefficient(norm, optimizer)
    if type(optimizer) is DeepSpeedZeroOptimizer_Stage3:
        _install_stage_3(norm, optimizer)
        return lambda: _zero_coefficient(norm, optimizer)
    if type(optimizer) is BF16_Optimizer:
        _install_bf16(norm, optimizer)
        return lambda: float(norm.max_norm / (optimizer._global_grad_norm + 1e-6))
    if type(optimizer) is FP16_UnfusedOptimizer:
        _install_unfused(norm, optimizer)
        return lambda: 1.0 / max(1.0, (optimizer._global_grad_norm + 1e-6) / norm.max_norm)
    if isinstance(optimizer, torch.optim.Optimizer):
        return norm.plain_coefficient
    raise ValueError(
        f"DeepSpeed chose {type(optimizer).__name__} for this configuration, which is not supported with megascale; "
        'use a ZeRO stage from 1 to 3, or "torch_adam": true in the optimizer\'s params'
    )


def _zero_coefficient(norm: SharedNorm, optimizer: Any) -> float:  # noqa: ANN401
    """As ``unscale_and_clip_grads``: the reciprocal of a factor that is at least 1."""
    total = torch.as_tensor(optimizer._global_grad_norm)  # fp64 under ZeRO 3
    if not bool(torch.isfinite(total)) or bool(total < 0):  # DeepSpeed divides by infinity then
        return 0.0
    return float(1.0 / torch.clamp((total + 1e-6) / norm.max_norm, min=1.0))


def _install_stage_1_and_2(norm: SharedNorm, optimizer: Any) -> None:  # noqa: ANN401
    from deepspeed.runtime.utils import combine_grad_norm_groups

    dense: Callable[..., torch.Tensor] = optimizer.scaled_global_norm

    def scaled_global_norm(norm_type: int = 2) -> torch.Tensor:
        found = dense(norm_type)
        combined: torch.Tensor = combine_grad_norm_groups([found, torch.tensor(norm.experts, device=found.device)])
        return combined

    optimizer.scaled_global_norm = scaled_global_norm


def _install_stage_3(norm: SharedNorm, optimizer: Any) -> None:  # noqa: ANN401
    dense: Callable[[], list[torch.Tensor]] = optimizer._get_norm_groups

    def norm_groups() -> list[torch.Tensor]:
        found = dense()
        return [*found, torch.tensor(norm.experts, device=found[0].device)]

    optimizer._get_norm_groups = norm_groups


def _install_bf16(norm: SharedNorm, optimizer: Any) -> None:  # noqa: ANN401
    """Its norm is that of a list of tensors, whole on every rank: a tensor of one element joins it."""
    dense: Callable[..., Any] = optimizer.get_grads_for_norm

    def get_grads_for_norm(for_clipping: bool = False) -> Any:  # noqa: ANN401
        if for_clipping:
            return dense(for_clipping=True)
        gradients, of_experts = dense()
        return [*gradients, torch.tensor([norm.experts], device=gradients[0].device)], of_experts

    optimizer.get_grads_for_norm = get_grads_for_norm


def _install_unfused(norm: SharedNorm, optimizer: Any) -> None:  # noqa: ANN401
    clip: Callable[..., float] = optimizer.unscale_and_clip_grads
    overflows: Callable[..., bool] = optimizer.overflow_checker.check

    def unscale_and_clip_grads(total_norm: Any, apply_scale: bool = True) -> float:  # noqa: ANN401
        optimizer._global_grad_norm = math.hypot(float(total_norm), norm.experts)
        return clip(optimizer._global_grad_norm, apply_scale=apply_scale)

    def check(param_groups: Any = None) -> bool:  # noqa: ANN401
        return overflows(param_groups) or not math.isfinite(norm.experts)

    optimizer.unscale_and_clip_grads = unscale_and_clip_grads
    optimizer.overflow_checker.check = check

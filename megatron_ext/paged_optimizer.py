"""The experts' pages as one more member of stock's chain of optimizers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.experts.module import PagedExperts
from megascale_omni.optimizer.paged_adam import PagedAdam
from megatron_ext.gradient_norm import Listed, NormParts, norm_of


class PagedOptimizer(MegatronOptimizer):
    """The experts' member of the chain. It has parameter groups (for the scheduler) but no parameters."""

    is_stub_optimizer = False

    def __init__(
        self,
        adam: PagedAdam,
        config: OptimizerConfig,
        gradients: Sequence[ExpertGradients],
        stats_group: dist.ProcessGroup,
        listed: Sequence[Listed],
    ) -> None:
        super().__init__(adam, config)  # type: ignore[arg-type]
        self.adam = adam
        self.gradients = tuple(gradients)
        for chunk in self.gradients:
            chunk.counts_zeros = bool(config.log_num_zeros_in_grad)
        self.grad_stats_parallel_group = stats_group
        self.clip_coefficient: float | dict[PagedExperts, float] | None = None
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self.device = device
        self.norm_parts: NormParts | None = None
        if config.bf16 and device.type == "cpu":  # see [Note: the last bit of the norm]
            self.norm_parts = NormParts(self.gradients, adam.shards, listed, device)
            for chunk in self.gradients:
                chunk.by_tensor = True

    def _get_param_groups(self) -> list[dict[str, Any]]:
        return self.adam.param_groups

    def _set_param_groups(self, value: list[dict[str, Any]]) -> None:
        self.adam.param_groups = value

    param_groups = property(_get_param_groups, _set_param_groups)
    state = property(lambda self: {})

    def get_parameters(self) -> list[torch.nn.Parameter]:
        """None: pages are not parameters."""
        return []

    def prepare_grads(self) -> bool:
        """Nothing to do: gradients are in pages already. Never reports an overflow (fp16 is refused)."""
        return False

    def squared_norm(self) -> float:
        """Sum of squares of the experts' gradients over the ranks of the stats group. A collective."""
        return self._sum(sum(gradients.squares(self.adam.shards) for gradients in self.gradients))

    def count_zeros(self) -> float:
        """Zero gradient elements of the experts, untouched experts included. A collective."""
        return self._sum(sum(gradients.zeros(self.adam.shards) for gradients in self.gradients))

    def _sum(self, value: float) -> float:
        total = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.grad_stats_parallel_group)
        return float(total.item())

    def get_grad_norm(self) -> float:
        """Norm of the experts' gradients. A collective."""
        if self.norm_parts is None:
            return math.sqrt(self.squared_norm())
        return norm_of(self.norm_parts.of_experts(), self.grad_stats_parallel_group)

    def get_main_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[torch.Tensor]:
        """What stands for the experts' gradients where stock adds up norms; they are in no group of their own."""
        assert self.norm_parts is not None
        return self.norm_parts.of_experts() if grad_norm_group is None else []

    get_grads_for_grad_norm = get_main_grads_for_grad_norm

    def step_with_ready_grads(self) -> bool:
        """Steps every page; multiplies gradients by ``clip_coefficient`` first."""
        self.adam.step(clip_coefficient=self.clip_coefficient)
        self.clip_coefficient = None
        return True

    def step(self) -> tuple[bool, float, float]:
        """Not used: the chain steps its members."""
        raise RuntimeError("PagedOptimizer is stepped by MegaScaleChainedOptimizer only")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: gradient pages are dropped by MegaScaleDDP.zero_grad_buffer, as stock's buffers are zeroed."""

    def get_loss_scale(self) -> torch.Tensor:
        """One: bf16 and fp32 need no loss scaling."""
        return torch.ones(1, dtype=torch.float32, device=self.device)

    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Masters are copied from the weights anew."""
        self.adam.refresh_masters()

    def state_dict(self) -> dict[str, Any]:
        """See MegaScaleChainedOptimizer."""
        raise RuntimeError("the state of paged experts is read through MegaScaleChainedOptimizer.sharded_state_dict")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See MegaScaleChainedOptimizer."""
        raise RuntimeError("the state of paged experts is loaded through MegaScaleChainedOptimizer.load_state_dict")

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401 - stock's signature
        """See MegaScaleChainedOptimizer."""
        raise RuntimeError("the state of paged experts is read through MegaScaleChainedOptimizer.sharded_state_dict")

    def offload_to_cpu(self) -> None:
        """Refused: ValueError."""
        raise ValueError("offloading the optimizer between phases is not supported with --megascale")

    def restore_from_cpu(self) -> None:
        """Refused: ValueError."""
        raise ValueError("offloading the optimizer between phases is not supported with --megascale")

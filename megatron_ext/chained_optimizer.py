"""Stock's optimizer for dense parameters and PagedAdam for experts, seen by stock as one chained optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megascale_omni.checkpoint.dense import TensorPiece
from megatron_ext.clipping import ModuleClipping, SkippingClipping
from megatron_ext.gradient_norm import gradients_for_norm, norm_of
from megatron_ext.optimizer_state import GroupPlaces, OptimizerState
from megatron_ext.paged_optimizer import PagedOptimizer

CLIP_STATE = "megascale_clip"
"""Key of the clipper's state in a checkpoint."""


class MegaScaleChainedOptimizer(ChainedOptimizer):
    """Stock's chain of dense optimizers, followed by the experts' pages.

    Norm, clipping and zero count are over both; the state dict has the form that stock would have written at this
    expert parallel size (see :mod:`megatron_ext.optimizer_state`).
    """

    def __init__(
        self,
        dense: ChainedOptimizer,
        paged: PagedOptimizer,
        *,
        expert_parallel: bool,
        places: GroupPlaces,
        clipping: ModuleClipping | SkippingClipping | None = None,
    ) -> None:
        super().__init__([*dense.chained_optimizers, paged])
        self.dense = dense
        self.paged = paged
        self.clipping = clipping
        self.before_step: Callable[[], None] = lambda: None
        self.carried: list[TensorPiece] = []
        """State of parameters that this run does not step, for the checkpoints that it saves."""
        self._expert_parallel = expert_parallel
        self._state = OptimizerState(dense=dense, adam=paged.adam, expert_parallel=expert_parallel, places=places)

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Norm over dense parameters and experts, as stock's: each gradient counted once. A collective."""
        norm = self._norm_of_all()
        clip_grad = self.config.clip_grad
        # Stock's coefficient (clip_grads.py), and its behaviour under NaN: not smaller than one, hence no clipping.
        coefficient = clip_grad / (norm + 1.0e-6) if clip_grad > 0.0 else 1.0
        self.paged.clip_coefficient = coefficient if coefficient < 1.0 else None
        return norm

    def _norm_of_all(self) -> float:
        parts = self.paged.norm_parts
        if parts is None:
            dense, experts = self.dense.get_grad_norm() or 0.0, self.paged.squared_norm()
            return math.sqrt(float(dense) ** 2 + experts)
        if self._expert_parallel:
            return float(super().get_grad_norm())
        found: list[torch.Tensor] = []  # stock has one optimizer here, and one list
        for member in self.dense.chained_optimizers:
            found += gradients_for_norm(member)
        return norm_of(parts.beside(found), self.paged.grad_stats_parallel_group)

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, float | None]:
        """As stock; where it is asked for, clips by module, or leaves out a step whose gradients are not finite."""
        try:
            return self._clip_and_step()
        finally:
            for schedule in {experts.manager.schedule for experts in self.paged.adam.modules}:
                schedule.end_step()

    def _clip_and_step(self) -> tuple[bool, float | None, float | None]:
        if self.clipping is None:
            result: tuple[bool, float | None, float | None] = super().step()
            return result
        norm = None if self.prepare_grads() else self.clipping.clip(self.get_grad_norm)
        if norm is None:
            return False, None, None
        self.paged.clip_coefficient = self.clipping.of_experts()
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        return self.step_with_ready_grads(), norm, zeros

    @torch.no_grad()
    def count_zeros(self) -> float:
        """Zeros over dense parameters and experts. A collective."""
        return float(self.dense.count_zeros()) + self.paged.count_zeros()

    def step_with_ready_grads(self) -> bool:
        """As stock; a save that goes on beside training is told before anything changes."""
        self.before_step()
        return bool(super().step_with_ready_grads())

    def _synchronize_steps(self) -> None:
        """Torch's optimizers count steps by parameter, PagedAdam by itself: there is nothing to align."""

    def state_dict(self) -> list[dict[str, Any]]:
        """Refused, with the two methods below: stock's unsharded format.

        Raises:
            ValueError: names the format that works.
        """
        raise ValueError(
            "--ckpt-format torch is not supported with --megascale; use torch_dist, which loads in stock too"
        )

    def save_parameter_state(self, filename: str) -> None:
        """Refused as :meth:`state_dict`: stock would leave the experts out."""
        self.state_dict()

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Refused as :meth:`state_dict`: stock would leave the experts out."""
        self.state_dict()

    def sharded_state_dict(
        self,
        model_sharded_state_dict: dict[str, Any],
        is_loading: bool = False,
        **kwargs: Any,  # noqa: ANN401 - stock's signature
    ) -> dict[Any, Any]:
        """Stock's sharded optimizer state, experts included. A collective where state is sharded."""
        state = self._state.sharded(model_sharded_state_dict, is_loading=is_loading, **kwargs)
        if self.clipping is not None and not is_loading:
            _inner_state(state)[CLIP_STATE] = self.clipping.state_dict()
        return state

    def described_state(self) -> dict[str, Any]:
        """The part of :meth:`sharded_state_dict` that is no tensor."""
        return self._state.described()

    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        """Loads what :meth:`sharded_state_dict` described."""
        parts = [part for part in (state_dict, state_dict.get(0), state_dict.get(1)) if isinstance(part, dict)]
        found = [part.pop(CLIP_STATE) for part in parts if CLIP_STATE in part]
        clip = found[0] if found else None
        self._state.load(state_dict)
        if self.clipping is not None and clip is not None:
            self.clipping.load_state_dict(clip)


def _inner_state(state: dict[Any, Any]) -> dict[Any, Any]:
    """The dict of an optimizer's state that may have one more entry, which stock does not look at."""
    inner: dict[Any, Any] = state if not {0, 1} & state.keys() else state[1]
    return inner

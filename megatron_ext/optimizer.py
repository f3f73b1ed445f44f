"""Stock's optimizer for dense parameters and PagedAdam for experts, seen by stock as one chained optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import _get_param_groups
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.experts.shards import PageShards
from megascale_omni.optimizer.arithmetic import AdamArithmetic, arithmetic_for
from megascale_omni.optimizer.paged_adam import GroupBinding, PagedAdam
from megascale_omni.paging.planes import Plane
from megatron_ext import support
from megatron_ext.distributed import MegaScaleDDP
from megatron_ext.experts import SOURCE, MegaScaleExperts
from megatron_ext.optimizer_state import OptimizerState


class PagedOptimizer(MegatronOptimizer):
    """The experts' member of the chain. It has parameter groups (for the scheduler) but no parameters."""

    is_stub_optimizer = False

    def __init__(
        self,
        adam: PagedAdam,
        config: OptimizerConfig,
        gradients: Sequence[ExpertGradients],
        stats_group: dist.ProcessGroup,
    ) -> None:
        super().__init__(adam, config)  # type: ignore[arg-type]
        self.adam = adam
        self.gradients = tuple(gradients)
        self.grad_stats_parallel_group = stats_group
        self.clip_coefficient: float | None = None
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self._device = device

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
        return self._sum(self._statistics()[0])

    def count_zeros(self) -> float:
        """Zero gradient elements of the experts, untouched experts included. A collective."""
        return self._sum(self._statistics()[1])

    def _statistics(self) -> tuple[float, int]:
        found = [gradients.statistics(self.adam.shards) for gradients in self.gradients]
        return sum(squares for squares, _ in found), sum(zeros for _, zeros in found)

    def _sum(self, value: float) -> float:
        total = torch.tensor([value], dtype=torch.float64, device=self._device)
        dist.all_reduce(total, group=self.grad_stats_parallel_group)
        return float(total.item())

    def get_grad_norm(self) -> float:
        """Norm of the experts' gradients. A collective."""
        return math.sqrt(self.squared_norm())

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
        return torch.ones(1, dtype=torch.float32, device=self._device)

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


class MegaScaleChainedOptimizer(ChainedOptimizer):
    """Stock's chain of dense optimizers, followed by the experts' pages.

    Norm, clipping and zero count are over both; the state dict has the form that stock would have written at this
    expert parallel size (see :mod:`megatron_ext.optimizer_state`).
    """

    def __init__(self, dense: ChainedOptimizer, paged: PagedOptimizer, *, expert_parallel: bool) -> None:
        super().__init__([*dense.chained_optimizers, paged])
        self.dense = dense
        self.paged = paged
        self._state = OptimizerState(dense=dense, adam=paged.adam, expert_parallel=expert_parallel)

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Norm over dense parameters and experts, as stock's: each gradient counted once. A collective."""
        dense, experts = self.dense.get_grad_norm() or 0.0, self.paged.squared_norm()
        norm = math.sqrt(float(dense) ** 2 + experts)
        clip_grad = self.config.clip_grad
        # Stock's coefficient (clip_grads.py), and its behaviour under NaN: not smaller than one, hence no clipping.
        coefficient = clip_grad / (norm + 1.0e-6) if clip_grad > 0.0 else 1.0
        self.paged.clip_coefficient = coefficient if coefficient < 1.0 else None
        return norm

    @torch.no_grad()
    def count_zeros(self) -> float:
        """Zeros over dense parameters and experts. A collective."""
        return float(self.dense.count_zeros()) + self.paged.count_zeros()

    def _synchronize_steps(self) -> None:
        """Torch's optimizers count steps by parameter, PagedAdam by itself: there is nothing to align."""

    def state_dict(self) -> list[dict[str, Any]]:
        """Refused: stock's unsharded format.

        Raises:
            ValueError: names the format that works.
        """
        raise ValueError(
            "--ckpt-format torch is not supported with --megascale; use torch_dist, which loads in stock too"
        )

    def sharded_state_dict(
        self,
        model_sharded_state_dict: dict[str, Any],
        is_loading: bool = False,
        **kwargs: Any,  # noqa: ANN401 - stock's signature
    ) -> dict[Any, Any]:
        """Stock's sharded optimizer state, experts included. A collective where state is sharded."""
        return self._state.sharded(model_sharded_state_dict, is_loading=is_loading, **kwargs)

    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        """Loads what :meth:`sharded_state_dict` described."""
        self._state.load(state_dict)


def build_optimizer(
    stock: Callable[..., ChainedOptimizer],
    config: OptimizerConfig,
    model_chunks: Sequence[torch.nn.Module],
    config_overrides: dict[Any, Any] | None = None,
    **options: Any,  # noqa: ANN401 - stock's signature
) -> ChainedOptimizer:
    """Stock's ``get_megatron_optimizer`` for chunks that hold paged experts.

    Raises:
        ValueError: an unsupported optimizer option, or no paged experts in the whole model (on every rank).
    """
    chunks = [chunk for chunk in model_chunks if isinstance(chunk, MegaScaleDDP)]
    if len(chunks) < len(model_chunks):
        return stock(config, model_chunks, config_overrides, **options)
    support.check("optimizer", config)
    _refuse_dense_model(chunks)
    dense = stock(config, model_chunks, config_overrides, **options)
    bindings, groups = _paged_groups(config, chunks, config_overrides)
    expert_parallel = chunks[0].config.expert_model_parallel_size > 1
    shards, stats_group = PageShards(), _stats_group(dense, expert_parallel)
    if config.use_distributed_optimizer:
        group: dist.ProcessGroup = chunks[0].intra_expt_dp_group
        shards = PageShards(rank=group.rank(), size=group.size(), group=group)
    for experts in bindings:
        manager, pages = experts.manager, experts.pages
        if pages.dtypes[Plane.WEIGHT] is not torch.float32:
            manager.set_plane_dtype(pages, Plane.MASTER, torch.float32)
        manager.set_plane_dtype(pages, Plane.MOMENT1, torch.float32)
        manager.set_plane_dtype(pages, Plane.MOMENT2, torch.float32)
    for manager in {experts.manager for experts in bindings}:
        manager.check_budget()
    lag = next((e.runtime.config.paging.max_lag_steps for e in bindings), 0)
    arithmetic = _arithmetic(config, dense)
    adam = PagedAdam(bindings.items(), groups=groups, arithmetic=arithmetic, shards=shards, max_lag=lag)
    for experts in bindings:
        experts.adam = adam
    paged = PagedOptimizer(adam, config, [chunk.gradients for chunk in chunks], stats_group)
    return MegaScaleChainedOptimizer(dense, paged, expert_parallel=expert_parallel)


def _refuse_dense_model(chunks: Sequence[MegaScaleDDP]) -> None:
    device = next(chunks[0].parameters()).device
    count = torch.tensor([sum(len(chunk.paged_experts) for chunk in chunks)], device=device)
    dist.all_reduce(count)
    if not count.item():
        raise ValueError("--megascale needs a mixture-of-experts model: no layer of this one has experts")


def _stats_group(dense: ChainedOptimizer, expert_parallel: bool) -> dist.ProcessGroup:
    """Ranks whose experts' gradients make up the whole model's, each once: the group of stock's expert optimizer."""
    first = dense.chained_optimizers[0]
    if isinstance(first, DistributedOptimizer) or not expert_parallel:
        return first.get_grad_stats_parallel_group()
    from megatron.core import parallel_state

    return parallel_state.get_expert_tensor_model_pipeline_parallel_group()


def _arithmetic(config: OptimizerConfig, dense: ChainedOptimizer) -> AdamArithmetic:
    """The arithmetic of stock's dense optimizer.

    Raises:
        ValueError: stock uses an optimizer whose arithmetic MegaScale does not have.
    """
    inner = next((o.optimizer for o in dense.chained_optimizers if o.optimizer is not None), None)
    decoupled, fused = bool(config.decoupled_weight_decay), False
    if inner is not None:
        if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            raise ValueError(
                f"stock chose {type(inner).__module__}.{type(inner).__name__}; with --megascale experts are stepped in "
                "torch's arithmetic only: hide Transformer Engine and Apex, so that stock uses torch.optim too"
            )
        fused = bool(inner.defaults.get("fused"))
    return arithmetic_for(decoupled=decoupled, fused=fused, amsgrad=False)


def _paged_groups(
    config: OptimizerConfig, model_chunks: Sequence[MegaScaleDDP], overrides: dict[Any, Any] | None
) -> tuple[dict[MegaScaleExperts, GroupBinding], list[dict[str, Any]]]:
    """The groups stock would have put the experts' tensors into, and which of them each module's regions belong to."""
    experts = [module for chunk in model_chunks for module in chunk.paged_experts]
    stock_groups = _stock_groups(config, model_chunks, experts, overrides)
    groups: list[dict[str, Any]] = []
    weights: dict[MegaScaleExperts, int] = {}
    biases: dict[MegaScaleExperts, int] = {}
    for stock_group in stock_groups:
        sources = [getattr(p, SOURCE) for p in stock_group["params"] if hasattr(p, SOURCE)]
        if not sources and not stock_group["is_expert_parallel"]:
            continue
        # torch.optim gives a group what it does not set itself.
        group = {**_torch_defaults(config), **{k: v for k, v in stock_group.items() if k != "params"}, "params": []}
        for module, name in sources:
            target = biases if name.endswith(".bias") else weights
            if target.setdefault(module, len(groups)) != len(groups):
                raise ValueError(
                    f"{module.path}: experts of one module cannot be in different parameter groups with --megascale; "
                    f"{name} is in another one than its siblings"
                )
        groups.append(group)
    return {m: GroupBinding(weights[m], biases.get(m)) for m in experts if m in weights}, groups


def _torch_defaults(config: OptimizerConfig) -> dict[str, Any]:
    inner = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
    probe = inner(
        [torch.nn.Parameter(torch.empty(0))],
        lr=config.lr,
        weight_decay=config.weight_decay,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
    )
    return {key: value for key, value in probe.param_groups[0].items() if key != "params"}


def _stock_groups(
    config: OptimizerConfig,
    model_chunks: Sequence[MegaScaleDDP],
    experts: Sequence[MegaScaleExperts],
    overrides: dict[Any, Any] | None,
) -> list[dict[str, Any]]:
    """Stock's parameter groups of the whole model, experts included as stand-ins. A collective of all ranks."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        for module in experts:
            stack.enter_context(module.visible())
        groups: list[dict[str, Any]] = _get_param_groups(list(model_chunks), config, overrides)
    return groups

"""HfExperts: paged experts with the call of Hugging Face's experts modules.

Shape suffixes: T tokens, k experts a token, N = T k rows sorted by expert, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_ext.expert_parallel import exchange_counts, exchange_rows
from deepspeed_ext.recognise import Description
from deepspeed_ext.run import Run
from megascale_omni.experts.combine import Combine
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.tokens import ComingCounts
from megascale_omni.paging.planes import Plane


class DeepSpeedExperts(PagedExperts):
    """Paged experts of a model under DeepSpeed, whatever calls them.

    Args:
        run: what the modules of an engine share. path: the module's path in the model. described: the stock module.
        dtype: of weights. gradient_dtype: of accumulated gradients.
    """

    def __init__(
        self, run: Run, *, path: str, described: Description, dtype: torch.dtype, gradient_dtype: torch.dtype
    ) -> None:
        self.owned = run.ranks.local(described.num_experts)
        if described.num_experts < run.ranks.size:  # some rank would have none: all are to say so
            raise ValueError(
                f"{path}: {described.num_experts} experts cannot be divided among {run.ranks.size} ranks; choose a "
                'smaller "expert_parallel_size"'
            )
        super().__init__(
            manager=run.manager,
            path=path,
            layout=run.layout(described.shape, dtype),
            num_experts=len(self.owned),
            dtypes={Plane.WEIGHT: dtype, Plane.GRADIENT: gradient_dtype},
            activation=described.activation,
            style=described.style,
            products=run.products,
            workspace=run.workspace,
            backend=run.backend,
        )
        self.run = run
        self.all_experts = described.num_experts
        self.requires_grad_(described.trainable)

    def take(self, expert: int, tensors: dict[str, torch.Tensor]) -> None:
        """Makes the pages of an expert (its number in the model) from tensors of this expert alone, ``[1, ...]``.

        Nothing where another rank owns it.
        """
        if expert not in self.owned:
            return
        local = expert - self.owned.start
        views = {name: _AsExpert(tensor, local, self.num_experts) for name, tensor in tensors.items()}
        self.initialise(local, views)  # type: ignore[arg-type]

    def gathered(self) -> dict[str, torch.Tensor]:
        """Stock's tensors of all experts, wherever they are. A collective where ranks divide them."""
        return whole(self)

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401 - copy, deepcopy and pickle all ask for this
        """Refused: pages belong to one engine."""
        raise TypeError(
            f"{self.path}: experts in pages cannot be copied or pickled; copy the model before deepspeed.initialize "
            "(or load it twice, each in a deepspeed_ext.init block of its own), and save its state_dict() only"
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> DeepSpeedExperts:
        """Module-wide conversions may change nothing about pages: these keep the dtype they were made with."""
        probe = fn(torch.empty(0, dtype=self.pages.dtypes[Plane.WEIGHT], device=self.manager.arena.device))
        if probe.dtype != self.pages.dtypes[Plane.WEIGHT]:
            raise ValueError(
                f"{self.path}: paged experts cannot change from {self.pages.dtypes[Plane.WEIGHT]} to {probe.dtype}; "
                "choose the dtype with DeepSpeed's bf16 section"
            )
        return super()._apply(fn, recurse)  # type: ignore[no-any-return]

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        if self.run.hidden:
            return
        if self.num_experts != self.all_experts:
            raise ValueError(
                f"{self.path}: this rank holds experts {self.owned.start} to {self.owned.stop - 1} of "
                f"{self.all_experts} only, so that state_dict() would be incomplete; use "
                "deepspeed_ext.export_hf(engine, folder), which collects them from all ranks"
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - torch's own signature
        if not self.run.hidden:
            super()._load_from_state_dict(*args, **kwargs)


class ChosenCounts(ComingCounts):
    """Rows of each expert that a router chose; whoever hears of them hears of one that does not exist.

    ``counts_E1``: those of each expert, and of none. Where the host goes ahead, what was computed of such a choice is
    read by nobody: it is heard of before the optimizer's step.
    """

    def __init__(self, counts_E1: torch.Tensor, index_Tk: torch.Tensor, *, path: str) -> None:
        super().__init__(counts_E1)
        self.on_device, self._index_Tk, self._path = counts_E1[:-1], index_Tk, path

    def wait(self) -> list[int]:
        """The numbers. Raises ValueError where the router chose an expert that there is not."""
        *counts, strange = super().wait()
        if strange:
            index_Tk = self._index_Tk
            chosen = index_Tk[(index_Tk < 0) | (index_Tk >= len(counts))][0]
            raise ValueError(f"{self._path}: the router chose expert {int(chosen)} of {len(counts)}")
        return counts


class HfExperts(DeepSpeedExperts):
    """Drop-in for Hugging Face's experts modules: ``(hidden [T, h], top_k_index [T, k], top_k_weights [T, k])``.

    ``eager`` says which of stock's two ways the weighted outputs of a token are added in: one expert after the other in
    the model's dtype, or, as ``grouped_mm`` does, all at once.
    """

    def __init__(
        self,
        run: Run,
        *,
        path: str,
        described: Description,
        dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        eager: bool,
    ) -> None:
        super().__init__(run, path=path, described=described, dtype=dtype, gradient_dtype=gradient_dtype)
        self.eager = eager

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor | None = None,
        top_k_weights: torch.Tensor | None = None,
        *,
        router_indices: torch.Tensor | None = None,
        routing_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As stock's; GPT-OSS names the routing otherwise."""
        index_Tk = top_k_index if router_indices is None else router_indices
        weights_Tk = top_k_weights if routing_weights is None else routing_weights
        if index_Tk is None or weights_Tk is None or index_Tk.shape != weights_Tk.shape:
            raise ValueError(f"{self.path}: experts need indices and weights [tokens, top-k] of the router")
        coming = ChosenCounts(self._counts_of(index_Tk), index_Tk, path=self.path)
        combine = Combine.of_routing(index_Tk, each=self.eager)
        weights_N = weights_Tk.reshape(-1).index_select(0, combine.order_N)
        by_index = self.run.ranks.size == 1 and self.context.backend.by_index
        x = hidden_states if by_index else hidden_states.index_select(0, combine.token_N)
        if by_index:
            told = coming if self.goes_ahead else coming.wait()
            return super().forward(x, told, weights_N, combine.token_N, combine)
        counts = coming.wait()
        return self._combine(self._outputs(x, counts) * weights_N.unsqueeze(-1), combine, hidden_states.dtype)

    def _counts_of(self, index_Tk: torch.Tensor) -> torch.Tensor:
        """``[E + 1]``: rows of each expert, and of none. The host need not wait for its size, as for bincount's."""
        index_N = index_Tk.reshape(-1).long()
        known_N = (index_N >= 0) & (index_N < self.all_experts)
        bins_N = torch.where(known_N, index_N, self.all_experts)
        return index_N.new_zeros(self.all_experts + 1).scatter_add_(0, bins_N, torch.ones_like(bins_N))

    def _outputs(self, x_Nh: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Experts' outputs for rows sorted by expert, wherever the experts are."""
        ranks = self.run.ranks
        if ranks.size == 1:
            return super().forward(x_Nh, counts)
        plan = exchange_counts(ranks, counts)
        received_Mh = exchange_rows(x_Nh, plan.sent, plan.received, ranks)
        sorted_M, local_counts = plan.by_local_expert(x_Nh.device)
        if self.context.backend.by_index:  # each row that came is read, and its output lands, where it is
            y_Mh = super().forward(received_Mh, local_counts, None, sorted_M)
            return exchange_rows(y_Mh, plan.received, plan.sent, ranks)
        y_Mh = super().forward(received_Mh.index_select(0, sorted_M), local_counts)
        back_M = torch.empty_like(sorted_M)
        back_M[sorted_M] = torch.arange(len(sorted_M), device=sorted_M.device)
        return exchange_rows(y_Mh.index_select(0, back_M), plan.received, plan.sent, ranks)

    @staticmethod
    def _combine(weighted_Nh: torch.Tensor, combine: Combine, dtype: torch.dtype) -> torch.Tensor:
        """A token's weighted outputs added as stock adds them, ``[T, h]`` in ``dtype``."""
        (tokens, top_k), hidden = combine.position_Tk.shape, weighted_Nh.shape[1]
        if not combine.each:
            rows_N = combine.position_Tk.reshape(-1)
            return weighted_Nh.index_select(0, rows_N).view(tokens, top_k, hidden).sum(dim=1).to(dtype)
        total_Th = weighted_Nh.new_zeros(tokens, hidden, dtype=dtype)
        for place in range(top_k):
            total_Th = total_Th + weighted_Nh.index_select(0, combine.position_Tk[:, place]).to(dtype)
        return total_Th


class _AsExpert:
    """One expert's tensor ``[1, ...]`` seen as that of a module with many: what :class:`NamedTensors` asks of it."""

    def __init__(self, tensor: torch.Tensor, expert: int, num_experts: int) -> None:
        self._tensor, self._expert = tensor, expert
        self.shape = (num_experts, *tensor.shape[1:])

    def view(self, shape: tuple[int, ...]) -> _AsExpert:
        """As torch's; the shape is the module's own."""
        if tuple(shape) != self.shape:
            raise RuntimeError(f"an expert's tensor {self.shape} is seen as {tuple(shape)}")
        return self

    def __getitem__(self, index: tuple[Any, ...]) -> torch.Tensor:
        if index[0] != self._expert:
            raise RuntimeError(f"expert {index[0]} is asked of a tensor of expert {self._expert}")
        part: torch.Tensor = self._tensor[(0, *index[1:])]
        return part


@torch.no_grad()
def whole(experts: DeepSpeedExperts, plane: Plane = Plane.WEIGHT) -> dict[str, torch.Tensor]:
    """Named tensors of all experts of a module, wherever they are. A collective where ranks divide them."""
    local, ranks = experts.dense(plane), experts.run.ranks
    if ranks.size == 1:
        return local
    counts = [len(ranks.experts_of(rank, experts.all_experts)) for rank in range(ranks.size)]
    result: dict[str, torch.Tensor] = {}
    for name, tensor in local.items():
        padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = tensor.new_empty(ranks.size * max(counts), *tensor.shape[1:])
        dist.all_gather_into_tensor(parts, padded, group=ranks.parallel)
        pieces = parts.view(ranks.size, max(counts), *tensor.shape[1:])
        result[name] = torch.cat([piece[:count] for piece, count in zip(pieces, counts, strict=True)])
    return result


@torch.no_grad()
def broadcast(experts: DeepSpeedExperts) -> None:
    """Weight pages become those of the first of the ranks that have the same experts. A collective."""
    group = experts.run.ranks.data
    if group is None or dist.get_world_size(group) == 1:
        return
    source = dist.get_global_rank(group, 0)
    for expert in range(experts.num_experts):
        for slice_ in range(experts.layout.num_slices):
            with experts.lease(Plane.WEIGHT, [(expert, slice_)]) as lease:
                dist.broadcast(lease.page(expert, slice_), src=source, group=group)
                lease.mark_dirty()

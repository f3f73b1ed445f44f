"""MegaScaleExperts: paged experts that stock Megatron-Core takes for its own.

[Note: the shell]
A stock experts module with a single expert is built once for each local expert, so that initial weights come from
stock's own code in stock's order of random numbers, one expert in memory at a time. The last one stays as the
*shell*: no weights, but stock's names, attributes and sharding rules. Whatever stock must know about the experts'
tensors (their order in parameter groups, their sharded state dict) is asked of the shell, filled with stand-ins; no
stock rule is written again here.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, import_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.tokens import ComingCounts, Index
from megascale_omni.optimizer.paged_adam import PagedAdam
from megascale_omni.paging.layout import ExpertShape, PageLayout
from megascale_omni.paging.planes import Plane
from megatron_ext import support
from megatron_ext.activation import activation_of
from megatron_ext.runtime import Runtime
from megatron_ext.spared_copies import join_in_place

SOURCE = "megascale_source"
"""Attribute of a stand-in Parameter: (experts module, tensor name)."""


class MegaScaleExperts(PagedExperts):
    """Drop-in for stock's ``SequentialMLP``: same call, same state dict, weights in pages.

    Args:
        num_local_experts, config, pg_collection, name: as stock's. stock_spec: the experts spec (or, in newer
        releases, the builder) that this replaces.
        runtime: what the modules of a run share.

    Raises:
        ValueError: an experts class other than ``SequentialMLP``, an unsupported activation, a page size that does
        not fit, experts spread over ranks in a way that :func:`megatron_ext.support.check_spread` refuses, process
        groups of other sizes than the configuration's.

    Attributes:
        first_neuron, neurons_of_all: of an expert, the first neuron that is here and how many there are on all ranks
        (see [Note: spread experts]).
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        stock_spec: ModuleSpec | type | Callable[..., SequentialMLP],
        runtime: Runtime,
        name: str | None = None,
    ) -> None:
        stock_class = _stock_class(stock_spec)
        if stock_class is not SequentialMLP:
            raise ValueError(
                f"experts class {stock_class.__name__} is not supported with --megascale; "
                "leave out --moe-grouped-gemm, so that stock uses SequentialMLP"
            )
        support.check_spread(config)
        if pg_collection is not None:
            support.check_groups(config, pg_collection)
        shell = _built(stock_spec, config, pg_collection)
        mlp = shell.local_experts[0]
        wide, hidden = mlp.linear_fc1.weight.shape
        shape = ExpertShape(
            hidden=hidden,
            ffn=wide // (2 if config.gated_linear_unit else 1),
            gated=bool(config.gated_linear_unit),
            bias=bool(config.add_bias_linear),
        )
        dtype = mlp.linear_fc1.weight.dtype
        page_bytes = runtime.config.paging.page_size_bytes
        super().__init__(
            manager=runtime.manager,
            path=runtime.provisional_path(),
            layout=PageLayout.for_page_bytes(shape, page_bytes=page_bytes, dtype=dtype),
            num_experts=num_local_experts,
            dtypes={Plane.WEIGHT: dtype, Plane.GRADIENT: dtype},
            activation=activation_of(config),
            style="sequential",
            products=runtime.products,
            workspace=runtime.workspace,
            backend=runtime.backend,
        )
        self.config = config
        self.runtime = runtime
        self._left_out = False
        self.adam: PagedAdam | None = None  # set by the optimizer that steps these pages
        self.expert_parallel = config.expert_model_parallel_size > 1
        ranks, rank = (1, 0) if pg_collection is None else (pg_collection.ep.size(), pg_collection.ep.rank())
        self.num_global_experts = ranks * num_local_experts
        spread, place = (
            (1, 0) if pg_collection is None else (pg_collection.expt_tp.size(), pg_collection.expt_tp.rank())
        )
        self.neurons_of_all, self.first_neuron = spread * shape.ffn, place * shape.ffn
        self.stock_numbers = tuple(range(rank * num_local_experts, (rank + 1) * num_local_experts))
        self.numbers = self.stock_numbers
        if runtime.observation.keeper is not None and self.expert_parallel:
            # A token's row goes to its expert and back, and so do its gradients.
            runtime.observation.keeper.map.travels[self.pages.entry.module] = 4 * hidden * dtype.itemsize
        for expert in range(num_local_experts):
            if expert:
                shell = _built(stock_spec, config, pg_collection)
            self._take_initial_weights(expert, shell)
        # Held in a tuple, so that the shell is no submodule: stock must not find parameters in it.
        self._shell = (_emptied(shell),)

    @torch.no_grad()
    def _take_initial_weights(self, expert: int, shell: torch.nn.Module) -> None:
        prefix = f"local_experts.{expert}."
        values = {
            prefix + name.removeprefix("local_experts.0."): parameter.detach()
            for name, parameter in shell.named_parameters()
        }
        self.initialise(expert, values)

    # -- compute
    # --------------------------------------------------------------------------------------------------------

    def forward(  # type: ignore[override]
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """As stock's: tokens ``[N, h]`` sorted by expert, counts ``[E]``, probs ``[N]``; ->  ``([N, h], None)``."""
        x_Nh, probs_N = permuted_local_hidden_states, permuted_probs
        if self.config.moe_apply_probs_on_input:
            if self.config.moe_router_topk != 1:
                raise ValueError("moe_apply_probs_on_input needs moe_router_topk=1")
            x_Nh = (probs_N.unsqueeze(-1) * x_Nh).to(x_Nh.dtype)
            return super().forward(x_Nh, tokens_per_expert.tolist(), None), None
        return super().forward(x_Nh, tokens_per_expert.tolist(), probs_N), None

    def compute(
        self, x_Th: torch.Tensor, counts: Sequence[int] | ComingCounts, probs_N: torch.Tensor, index: Index
    ) -> torch.Tensor:
        """The sum ``[T, h]`` of each token's experts; see :meth:`PagedExperts.forward`."""
        return super().forward(x_Th, counts, probs_N, index)

    def _apply(self, fn: Any, recurse: bool = True) -> MegaScaleExperts:  # noqa: ANN401 - torch's own signature
        """Module-wide conversions may change nothing about pages: these keep the dtype they were made with."""
        probe = fn(torch.empty(0, dtype=self.pages.dtypes[Plane.WEIGHT], device=self.manager.arena.device))
        if probe.dtype != self.pages.dtypes[Plane.WEIGHT]:
            raise ValueError(
                f"{self.path}: paged experts cannot change from {self.pages.dtypes[Plane.WEIGHT]} to {probe.dtype} "
                f"after they were built; build the model with params_dtype={probe.dtype}"
            )
        return super()._apply(fn, recurse)  # type: ignore[no-any-return]

    # -- what stock asks about parameters
    # -------------------------------------------------------------------------------

    def stand_ins(self, tensors: Mapping[str, torch.Tensor]) -> SequentialMLP:
        """A stock experts module whose parameters are ``tensors``, by name; nothing is copied."""
        shell = copy.copy(self._shell[0])
        shell._modules = dict(shell._modules)
        experts = [self._stand_in(shell.local_experts[0], expert, tensors) for expert in range(self.num_experts)]
        shell._modules["local_experts"] = torch.nn.ModuleList(experts)
        shell.num_local_experts = self.num_experts
        return shell

    def _stand_in(self, template: torch.nn.Module, expert: int, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        mlp = copy.copy(template)
        mlp._modules = dict(mlp._modules)
        for child in ("linear_fc1", "linear_fc2"):
            stock = mlp.get_submodule(child)
            linear = copy.copy(stock)
            linear._parameters = {}
            for kind, old in stock._parameters.items():
                if old is None:
                    linear._parameters[kind] = None
                    continue
                name = f"local_experts.{expert}.{child}.{kind}"
                parameter = torch.nn.Parameter(tensors[name], requires_grad=self.trainable)
                parameter.__dict__.update(old.__dict__)
                setattr(parameter, SOURCE, (self, name))
                linear._parameters[kind] = parameter
            mlp._modules[child] = linear
        return mlp

    @contextmanager
    def visible(self) -> Iterator[None]:
        """While it lasts, ``named_parameters()`` of the model lists the experts' stand-ins (no data) as stock would."""
        empty = {t.name: torch.empty(t.shape, device="meta") for t in self.names.tensors()}
        self._modules["local_experts"] = self.stand_ins(empty).local_experts
        try:
            yield
        finally:
            del self._modules["local_experts"]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Stock's own sharded state dict of these experts; tensors are copies, marked with their source."""
        if self._left_out:
            return {}
        if self.adam is not None:
            self.adam.fetch_all(self)
        scratch = self.runtime.export.scratch()
        dense = self.dense(make=scratch)
        if scratch is not None:
            scratch.settle()
        whole = self.stand_ins(dense)
        if self.numbers == self.stock_numbers:
            return _joining_in_place(whole.sharded_state_dict(prefix, sharded_offsets, metadata))
        result: dict[str, Any] = {}
        for local, number in enumerate(self.numbers):
            # Stock numbers experts by rank and place; a group of as many ranks as experts gives each its own number.
            one = copy.copy(whole)
            one._modules = {**whole._modules, "local_experts": torch.nn.ModuleList([whole.local_experts[local]])}
            one.num_local_experts = 1
            one.ep_group = _Place(number, self.num_global_experts)
            for key, value in one.sharded_state_dict(prefix, sharded_offsets, metadata).items():
                result[key.replace(f"{prefix}local_experts.0.", f"{prefix}local_experts.{local}.", 1)] = value
        return _joining_in_place(result)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """While it is open, the sharded state dict has nothing of these experts, and no page is read for it."""
        self._left_out = True
        try:
            yield
        finally:
            self._left_out = False

    # -- counts
    # ---------------------------------------------------------------------------------------------------------

    def parameter_count(self) -> int:
        """Elements of the local experts."""
        return self.num_parameters

    def squared_parameter_norm(self) -> float:
        """Sum of squares of the local experts' parameters, in fp64; fp32 masters where the optimizer keeps any."""
        if self.adam is not None:
            return self.adam.squared_parameter_norm(self)
        total = 0.0
        for _, view in self.named_slices():
            total += float(torch.linalg.vector_norm(view, dtype=torch.float32)) ** 2
        return total


@dataclass(frozen=True)
class _Place:
    """A place in a process group, as far as stock's sharding rules ask for it."""

    number: int
    count: int

    def rank(self) -> int:
        """This place."""
        return self.number

    def size(self) -> int:
        """Of all places."""
        return self.count


def _joining_in_place(sharded: dict[str, Any]) -> dict[str, Any]:
    """A sharded state dict that makes no copies when it is loaded."""
    for value in nested_values(sharded):
        if isinstance(value, ShardedTensorFactory):
            join_in_place(value)
    return sharded


def _built(
    spec: ModuleSpec | type | Callable[..., SequentialMLP],
    config: TransformerConfig,
    pg_collection: ProcessGroupCollection | None,
) -> SequentialMLP:
    """A stock experts module with one expert."""
    if isinstance(spec, ModuleSpec | type):
        built: SequentialMLP = build_module(spec, 1, config, pg_collection=pg_collection)
        return built
    return spec(1, config, pg_collection=pg_collection)


def _stock_class(spec: ModuleSpec | type | Callable[..., SequentialMLP]) -> type:
    while isinstance(spec, functools.partial):
        spec = spec.func
    module: Any = spec.module if isinstance(spec, ModuleSpec) else spec
    found = module if isinstance(module, type) else import_module(module)
    assert isinstance(found, type)
    return found


def _emptied(shell: SequentialMLP) -> SequentialMLP:
    """The shell with parameters on the meta device: shapes and attributes, no memory."""
    for module in shell.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                empty = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                empty.__dict__.update(parameter.__dict__)
                module._parameters[name] = empty
    return shell

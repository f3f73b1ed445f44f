"""CPU patches for the mixture-of-experts layer: router, dispatchers, shared experts."""

from collections.abc import Sequence

import torch

from megatron_ext.cpu_patches.edits import Bind, Edit, Keep, NewBody, Reword, StockObject
from megatron_ext.cpu_patches.registry import patch

_MOE = "megatron.core.transformer.moe"
_TO_CPU = {"cuda": "cpu"}


@patch
def router_device() -> Sequence[Edit]:
    """The router moves its weight (`router.py` 90, 92) and makes its buffers (169-198) on the current CUDA device."""
    return [Reword(f"{_MOE}.router", name, names=_TO_CPU) for name in ("Router.gating", "TopKRouter.__init__")]


@patch
def router_product() -> Sequence[Edit]:
    """`moe_utils.py` 1192 and 1225 read `te_general_gemm`, which 38-39 leave unbound without Transformer Engine."""
    return [Bind(f"{_MOE}.moe_utils", "te_general_gemm", None)]


def reduce_over_tensor_ranks(input_: torch.Tensor, group: StockObject = None) -> torch.Tensor:
    from megatron.core.tensor_parallel import mappings

    group = mappings.get_tensor_model_parallel_group_if_none(group)
    reduced: torch.Tensor = mappings._ReduceFromModelParallelRegion.apply(input_, group) if group.size() > 1 else input_
    return reduced


@patch
def expert_bias() -> Sequence[Edit]:
    """`mlp.py` 247 adds an expert's output bias in place, which autograd forbids on what `mappings.py` 478 returns.

    At one tensor-parallel rank that autograd function is the identity and is left out. Only stock's own linear layers,
    the ones that run without Transformer Engine, come here, and only without expert parallelism.
    """
    name = "reduce_from_tensor_model_parallel_region"
    return [NewBody("megatron.core.tensor_parallel.mappings", name, reduce_over_tensor_ranks)]


@patch
def moe_metrics_device() -> Sequence[Edit]:
    """`track_moe_metrics` makes its buffers on 'cuda': `moe_utils.py` 998."""
    return [Reword(f"{_MOE}.moe_utils", "track_moe_metrics", constants=_TO_CPU)]


@patch
def gathered_tokens_device() -> Sequence[Edit]:
    """The dispatchers' collectives receive on the current CUDA device: `mappings.py` 91, 141, 148, 181, 442."""
    names = (
        "_gather_along_last_dim",
        "_gather_along_first_dim",
        "_reduce_scatter_along_first_dim",
        "_AllToAll.forward",
    )
    return [Reword("megatron.core.tensor_parallel.mappings", name, names=_TO_CPU) for name in names]


def _maybe_dtoh_and_synchronize(
    self: StockObject, point: str, tokens_per_expert: torch.Tensor | None = None
) -> torch.Tensor | None:
    if not self.drop_and_pad and point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            splits = getattr(self, name)
            if torch.is_tensor(splits):
                setattr(self, name, splits.numpy())
    return tokens_per_expert


@patch
def alltoall_split_sizes() -> Sequence[Edit]:
    """The all-to-all dispatcher copies split sizes to the host on a side stream: `token_dispatcher.py` 445, 863-900.

    The sizes are already there, but `maybe_move_tensor_to_cpu` (`moe_utils.py` 1093) then leaves them as tensors, and
    `torch.distributed.all_to_all_single` wants integers. What remains of the function is that conversion.
    """
    dispatcher = "MoEAlltoAllTokenDispatcher"
    return [
        Keep(f"{_MOE}.token_dispatcher", f"{dispatcher}.cuda_dtoh_stream"),
        Reword(f"{_MOE}.token_dispatcher", f"{dispatcher}.__init__", names=_TO_CPU),
        NewBody(f"{_MOE}.token_dispatcher", f"{dispatcher}._maybe_dtoh_and_synchronize", _maybe_dtoh_and_synchronize),
    ]


@patch
def shared_expert_stream() -> Sequence[Edit]:
    """Overlapped shared experts run on a stream of their own: `shared_experts.py` 123-277."""
    methods = (
        "__init__",
        "pre_forward_comm",
        "linear_fc1_forward_and_act",
        "linear_fc2_forward",
        "post_forward_comm",
        "get_output",
    )
    module = f"{_MOE}.shared_experts"
    return [
        Keep(module, "SharedExpertMLP.stream"),
        *(Reword(module, f"SharedExpertMLP.{method}", names=_TO_CPU) for method in methods),
    ]

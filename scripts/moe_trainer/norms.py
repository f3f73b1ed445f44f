"""The l2 norm of all parameters, each counted once however they are spread over ranks."""

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared


def parameter_norm(model: list[DistributedDataParallel]) -> float:
    """Return the l2 norm of the fp32 parameters of the whole model; the same on every rank. A collective.

    Main parameters are used where there are any (bf16): those of a distributed optimizer are shards, hence summed over
    data parallelism. Expert parameters are summed over the expert-parallel group as well. A module that keeps
    parameters elsewhere adds them through a method `squared_parameter_norm() -> float`, its own sum of squares.
    """
    dense, expert = _sum_of_squares(model)
    torch.distributed.all_reduce(
        dense.sharded, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    torch.distributed.all_reduce(expert.sharded, group=parallel_state.get_expert_data_parallel_group())
    dense_total, expert_total = dense.whole + dense.sharded, expert.whole + expert.sharded
    torch.distributed.all_reduce(dense_total, group=parallel_state.get_model_parallel_group())
    torch.distributed.all_reduce(expert_total, group=parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    return float((dense_total + expert_total).sqrt())


class _Sums:
    def __init__(self, device: torch.device) -> None:
        self.whole = torch.zeros((), dtype=torch.float64, device=device)
        self.sharded = torch.zeros((), dtype=torch.float64, device=device)


@torch.no_grad()
def _sum_of_squares(model: list[DistributedDataParallel]) -> tuple[_Sums, _Sums]:
    device = next(model[0].parameters()).device
    dense, expert = _Sums(device), _Sums(device)
    for chunk in model:
        for parameter in chunk.parameters():
            if not param_is_not_tensor_parallel_duplicate(parameter) or not param_is_not_shared(parameter):
                continue
            sums = dense if getattr(parameter, "allreduce", True) else expert
            sharded = getattr(parameter, "main_param_sharded", False)
            value = getattr(parameter, "main_param", parameter)
            if value is None:  # this rank has no shard of it
                continue
            squares = torch.linalg.vector_norm(value.detach().float()).double().square()
            if sharded:
                sums.sharded += squares
            else:
                sums.whole += squares
        for module in chunk.modules():
            if hasattr(module, "squared_parameter_norm"):
                expert.whole += module.squared_parameter_norm()
    return dense, expert


def count_parameters(model: list[DistributedDataParallel]) -> int:
    """Return the number of parameters of the whole model, each counted once. A collective.

    A module that keeps parameters elsewhere adds them through a method `parameter_count() -> int`.
    """
    device = next(model[0].parameters()).device
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for chunk in model:
        for parameter in chunk.parameters():
            if param_is_not_tensor_parallel_duplicate(parameter) and param_is_not_shared(parameter):
                counts[0 if getattr(parameter, "allreduce", True) else 1] += parameter.numel()
        for module in chunk.modules():
            if hasattr(module, "parameter_count"):
                counts[1] += module.parameter_count()
    dense, expert = counts[0].clone(), counts[1].clone()
    torch.distributed.all_reduce(dense, group=parallel_state.get_model_parallel_group())
    torch.distributed.all_reduce(expert, group=parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    return int(dense + expert)

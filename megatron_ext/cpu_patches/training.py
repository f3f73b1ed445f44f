"""CPU patches for the training loop: schedules, gradient buffers, optimizers, clipping, checks, checkpoints."""

from collections.abc import Sequence

import torch

from megatron_ext.cpu_patches.edits import Edit, Reword, StockObject, Wrap
from megatron_ext.cpu_patches.registry import patch

_TO_CPU = {"cuda": "cpu"}
_HALF_TYPES = {
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}
_FLOAT_TYPE = {"torch.cuda.FloatTensor": "torch.FloatTensor"}
_OPTIMIZER = "megatron.core.optimizer"


@patch
def schedules() -> Sequence[Edit]:
    """The three schedules count tokens in a tensor on "cuda": `pipeline_parallel/schedules.py` 596, 983, 2138."""
    names = ("no_pipelining", "pipelining_with_interleaving", "pipelining_without_interleaving")
    module = "megatron.core.pipeline_parallel.schedules"
    return [Reword(module, f"forward_backward_{name}", constants=_TO_CPU) for name in names]


@patch
def pipeline_messages() -> Sequence[Edit]:
    """Pipeline stages receive on the current CUDA device: `p2p_communication.py` 190-202, 313, 321 (242, 398 wait)."""
    names = ("_communicate_shapes", "_communicate")
    module = "megatron.core.pipeline_parallel.p2p_communication"
    return [Reword(module, f"P2PCommunicator.{name}", names=_TO_CPU) for name in names]


def send_aliases(
    original: StockObject,
    *,
    tensor_send_prev: torch.Tensor | None,
    tensor_send_next: torch.Tensor | None,
    **rest: object,
) -> object:
    return original(
        tensor_send_prev=None if tensor_send_prev is None else tensor_send_prev.detach(),
        tensor_send_next=None if tensor_send_next is None else tensor_send_next.detach(),
        **rest,
    )


@patch
def pipeline_sends() -> Sequence[Edit]:
    """Interleaved stages free an output (`schedules.py` 154) that is still being sent (`p2p_communication.py` 77-118).

    On CUDA the streams keep its memory; gloo's sender only holds the tensor whose memory was taken away. It is given an
    alias, which keeps the memory until the send is over.
    """
    return [Wrap("megatron.core.pipeline_parallel.p2p_communication", "_p2p_ops", send_aliases)]


@patch
def gradient_buffers() -> Sequence[Edit]:
    """Parameter and gradient buffers are made on the current CUDA device: `param_and_grad_buffer.py` 783, 800, 806."""
    return [
        Reword("megatron.core.distributed.param_and_grad_buffer", "_ParamAndGradBuffer.__init__", names=_TO_CPU),
    ]


@patch
def optimizer_scalars() -> Sequence[Edit]:
    """Loss scales are tensors on 'cuda': `optimizer.py` 473-485, 907, 1141."""
    module = f"{_OPTIMIZER}.optimizer"
    return [
        Reword(module, "MixedPrecisionOptimizer.__init__", constants=_TO_CPU),
        Reword(module, "FP32Optimizer.__init__", constants=_TO_CPU),
        Reword(module, "ChainedOptimizer.get_loss_scale", names=_TO_CPU),
    ]


@patch
def mixed_precision_types() -> Sequence[Edit]:
    """Parameters are sorted by 'torch.cuda...' type names: `optimizer.py` 671, 690; `distrib_optimizer.py` 361-582."""
    distributed = f"{_OPTIMIZER}.distrib_optimizer"
    return [
        Reword(
            f"{_OPTIMIZER}.optimizer",
            "Float16OptimizerWithFloat16Params.__init__",
            constants={**_HALF_TYPES, **_FLOAT_TYPE},
        ),
        Reword(
            distributed,
            "DistributedOptimizer._build_model_and_main_param_groups",
            constants={**_HALF_TYPES, **_FLOAT_TYPE},
        ),
        Reword(distributed, "DistributedOptimizer.__init__", constants=_HALF_TYPES),
    ]


def with_adam_state(original: StockObject, self: StockObject, *args: object, **kwargs: object) -> object:
    if not self.is_stub_optimizer and not self.optimizer.state:
        self.init_state_fn(self.optimizer, self.config)
        for state in self.optimizer.state.values():
            state.setdefault("step", torch.zeros(()))
    return original(self, *args, **kwargs)


def set_all_but_step(
    original: StockObject, self: StockObject, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> None:
    group, place = self.model_param_group_index_map[model_param]
    state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
    step = state.pop("step").clone()
    with torch.no_grad():
        original(self, model_param, tensors)
    state["step"] = step


@patch
def distributed_optimizer_checkpoint() -> Sequence[Edit]:
    """The distributed optimizer's checkpoints count on a GPU, 16-bit models, and Apex's or Transformer Engine's Adam.

    `distrib_optimizer.py` 642 fails before the first step, hence whenever a checkpoint is loaded: torch's Adam makes
    its state only then. 791, 1077 and 1089 make room for it on the current CUDA device. 807-813 give one step counter
    to all parameters, which torch's Adam would count up once a parameter; 940 looks for it in the checkpoint, which has
    none, and writes into an fp32 parameter that requires gradients.
    """
    module, name = f"{_OPTIMIZER}.distrib_optimizer", "DistributedOptimizer"
    return [
        Reword(module, f"{name}.load_state_dict", names=_TO_CPU),
        Reword(module, f"{name}.get_parameter_state_dp_zero", names=_TO_CPU),
        Wrap(module, f"{name}._set_main_param_and_optimizer_states", set_all_but_step),
        Wrap(module, f"{name}.sharded_state_dict", with_adam_state),
    ]


@patch
def gradient_norm() -> Sequence[Edit]:
    """Norm, clipping and zero count work on 'cuda' tensors: `clip_grads.py` 90-115, 167, 174, 207; `utils.py` 1207."""
    module = f"{_OPTIMIZER}.clip_grads"
    return [
        Reword(module, "get_grad_norm_fp32", constants=_TO_CPU),
        Reword(module, "clip_grad_by_total_norm_fp32", constants={**_TO_CPU, **_FLOAT_TYPE}),
        Reword(module, "count_zeros_fp32", constants=_TO_CPU),
        Reword("megatron.core.utils", "local_multi_tensor_l2_norm", constants=_TO_CPU),
    ]


@patch
def result_checks() -> Sequence[Edit]:
    """A rejected loss or gradient is reported with its CUDA device: `rerun_state_machine.py` 525-660, 1009."""
    module = "megatron.core.rerun_state_machine"
    names = ("validate_result", "_log_validation_error_to_file")
    return [Reword(module, f"RerunStateMachine.{name}", names=_TO_CPU) for name in names]


@patch
def checkpoint_messages() -> Sequence[Edit]:
    """Saving synchronises the device (`filesystem_async.py` 230) and shares failures on it (`state_dict_saver.py` 252).

    Loading in parallel exchanges tensors on "cuda": `exchange_utils.py` 98-110, 326, 336, 499, `fully_parallel.py` 272.
    """
    package = "megatron.core.dist_checkpointing"
    strategies = f"{package}.strategies"
    exchange = f"{package}.exchange_utils"
    return [
        Reword(f"{strategies}.filesystem_async", "FileSystemWriterAsync.preload_tensors", names=_TO_CPU),
        Reword(f"{strategies}.state_dict_saver", "save_state_dict_async_finalize", names=_TO_CPU),
        Reword(f"{strategies}.fully_parallel", "FullyParallelLoadStrategyWrapper.load", names=_TO_CPU),
        Reword(exchange, "_get_empty_tensor_for_exchange", constants=_TO_CPU),
        Reword(exchange, "exchange_loaded_tensors_gather_rounds", names=_TO_CPU, constants=_TO_CPU),
        Reword(exchange, "exchange_loaded_tensors_broadcast", names=_TO_CPU),
    ]

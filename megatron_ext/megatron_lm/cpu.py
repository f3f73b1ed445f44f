"""Places of Megatron-LM that need more than other words to run on a CPU, each repaired as its module is imported.

What is repaired is looked up by feature: a place that a release does not have is left alone where its absence means
that there is nothing to repair, and named in an error where it does not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch

from megatron_ext.cpu_patches.edits import Mute
from megatron_ext.cpu_patches.moe import reduce_over_tensor_ranks
from megatron_ext.cpu_patches.training import send_aliases, set_all_but_step, with_adam_state
from megatron_ext.megatron_lm.hooks import missing, wrap
from megatron_ext.megatron_lm.imports import Hook
from megatron_ext.megatron_lm.reword import reword


def _jit(module: ModuleType) -> None:
    """Small functions are compiled, which on a CPU needs a C++ compiler and much time: they run as they are written."""
    if not hasattr(module, "disable_jit_fuser"):
        raise missing(module.__name__, "disable_jit_fuser")
    module.disable_jit_fuser()


def _random(module: ModuleType) -> None:
    """Setting the state of random numbers is put off until an accelerator is initialised: here, it is done."""

    def at_once(call: Callable[[], None], **kwargs: object) -> None:
        call()

    for name, value in (("_lazy_call", at_once), ("_lazy_init", lambda: None)):
        if not hasattr(module, name):
            raise missing(module.__name__, name)
        setattr(module, name, value)
    Mute(module.__name__, "CPU RNG state changed within GPU RNG context").apply()


def _mappings(module: ModuleType) -> None:
    """A bias is added in place to what an autograd function returned, which autograd forbids (`mlp.py`)."""
    if not hasattr(module, "reduce_from_tensor_model_parallel_region"):
        raise missing(module.__name__, "reduce_from_tensor_model_parallel_region")
    module.reduce_from_tensor_model_parallel_region = reduce_over_tensor_ranks  # type: ignore[attr-defined]


def _as_numpy(
    original: Callable[..., Any], tensor: object, as_numpy: bool = False, record_stream: bool = False
) -> object:
    if torch.is_tensor(tensor) and tensor.device.type == "cpu":
        return tensor.numpy() if as_numpy else tensor
    return original(tensor, as_numpy, record_stream)


def _moe_utils(module: ModuleType) -> None:
    """Split sizes that are on the host already stay tensors; a name is unbound without Transformer Engine (0.16)."""
    wrap(module, "maybe_move_tensor_to_cpu", _as_numpy)
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None  # type: ignore[attr-defined]


def _messages(module: ModuleType) -> None:
    """Interleaved stages free an output that is still being sent."""
    wrap(module, "_p2p_ops", send_aliases)


def _distributed_optimizer(module: ModuleType) -> None:
    """Its checkpoints count on Apex's or Transformer Engine's Adam."""
    wrap(module.DistributedOptimizer, "_set_main_param_and_optimizer_states", set_all_but_step)
    wrap(module.DistributedOptimizer, "sharded_state_dict", with_adam_state)


def _fused_kernels(module: ModuleType) -> None:
    """Kernels of 0.16 that are compiled for an accelerator at start, whether they are used or not."""
    module.load = lambda args: None  # type: ignore[attr-defined]


def _inference_layers(module: ModuleType) -> None:
    """Whether a layer is one that derives from Transformer Engine's: without it, stock's class is no class (main)."""
    if not getattr(module, "HAVE_TE", True) and hasattr(module, "is_inference_column_parallel_linear"):
        module.is_inference_column_parallel_linear = lambda layer: False  # type: ignore[attr-defined]


def _training(module: ModuleType) -> None:
    """A script whose first line imports the plug-in was compiled before it: its functions name the accelerator."""
    wrap(module, "pretrain", _with_reworded_script)


def _with_reworded_script(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - stock's
    script = sys.modules["__main__"]
    for function in vars(script).values():
        if isinstance(function, FunctionType) and function.__module__ == script.__name__:
            function.__code__ = reword(function.__code__)
    return original(*args, **kwargs)


REPAIRS: dict[str, Hook] = {
    "megatron.core.jit": _jit,
    "megatron.core.tensor_parallel.random": _random,
    "megatron.core.tensor_parallel.mappings": _mappings,
    "megatron.core.tensor_parallel.inference_layers": _inference_layers,
    "megatron.core.transformer.moe.moe_utils": _moe_utils,
    "megatron.core.pipeline_parallel.p2p_communication": _messages,
    "megatron.core.optimizer.distrib_optimizer": _distributed_optimizer,
    "megatron.legacy.fused_kernels": _fused_kernels,
    "megatron.training.training": _training,
}
"""Repairs by module."""

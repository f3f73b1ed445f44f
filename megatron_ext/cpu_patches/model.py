"""CPU patches for building a model: random numbers, devices of new parameters and buffers, compiled functions."""

from collections.abc import Sequence

import torch

from megatron_ext.cpu_patches.edits import Edit, Mute, NewBody, Reword, Uncompile
from megatron_ext.cpu_patches.registry import patch

_TENSOR_PARALLEL = "megatron.core.tensor_parallel"
_TO_CPU = {"cuda": "cpu"}


def _get_cpu_rng_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_cpu_rng_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


@patch
def random_numbers() -> Sequence[Edit]:
    """The "cuda" random numbers of `tensor_parallel/random.py` are the CPU's default generator.

    Lines 55 and 84-111 read and write the state of a CUDA device, 235-238 and 422 seed it (`torch.random` has the same
    calls for the CPU). Line 266 warns when CPU numbers were drawn inside a fork: here that is what a fork is for.
    """
    module = f"{_TENSOR_PARALLEL}.random"
    to_default_generator = {"cuda": "random"}
    return [
        NewBody(module, "_get_cuda_rng_state", _get_cpu_rng_state),
        NewBody(module, "_set_cuda_rng_state", _set_cpu_rng_state),
        Reword(module, "CudaRNGStatesTracker.add", names=to_default_generator),
        Reword(module, "model_parallel_cuda_manual_seed", names=to_default_generator),
        Mute(module, "CPU RNG state changed within GPU RNG context"),
    ]


@patch
def parameter_device() -> Sequence[Edit]:
    """Parameters are made on `torch.cuda.current_device()`: `tensor_parallel/layers.py` 261, 873, 899, 1197, 1218."""
    classes = ("VocabParallelEmbedding", "ColumnParallelLinear", "RowParallelLinear")
    return [Reword(f"{_TENSOR_PARALLEL}.layers", f"{name}.__init__", names=_TO_CPU) for name in classes]


@patch
def tied_embedding_device() -> Sequence[Edit]:
    """Tied embeddings over pipeline stages go through `.cuda()`: `language_module.py` 244."""
    module = "megatron.core.models.common.language_module.language_module"
    return [Reword(module, "LanguageModule.setup_embeddings_and_output_layer", names=_TO_CPU)]


@patch
def rotary_device() -> Sequence[Edit]:
    """Rotary frequencies are made on, and moved to, the current CUDA device: `rotary_pos_embedding.py` 78, 162."""
    module = "megatron.core.models.common.embeddings.rotary_pos_embedding"
    return [Reword(module, f"RotaryEmbedding.{name}", names=_TO_CPU) for name in ("__init__", "get_emb")]


@patch
def attention_device() -> Sequence[Edit]:
    """Causal masks (`transformer/utils.py` 35, 40), softmax offsets (`dot_product_attention.py` 123, 132), scores.

    The buffer of attention scores is made by `utils.py` 631.
    """
    utils = "megatron.core.transformer.utils"
    return [
        Reword(utils, "get_default_causal_mask", constants=_TO_CPU),
        Reword(utils, "get_sliding_window_causal_mask", constants=_TO_CPU),
        Reword("megatron.core.transformer.dot_product_attention", "DotProductAttention.__init__", names=_TO_CPU),
        Reword("megatron.core.utils", "GlobalMemoryBuffer.get_tensor", names=_TO_CPU),
    ]


@patch
def no_compilation() -> Sequence[Edit]:
    """Small functions are wrapped in `torch.compile` (`jit.py` 21), which on CPU needs a C++ compiler and much time.

    They run as they are written; the arithmetic is theirs, without the compiler's contractions.
    """
    fusions = "megatron.core.fusions"
    return [
        Uncompile("megatron.core.activations", "squared_relu", "quick_gelu", "fast_gelu"),
        Uncompile("megatron.core.transformer.utils", "gelu_impl", "erf_gelu"),
        Uncompile("megatron.core.transformer.attention", "Attention._apply_output_gate"),
        Uncompile("megatron.core.transformer.torch_norm", "L2Norm._norm"),
        Uncompile("megatron.core.transformer.moe.router", "TopKRouter._apply_expert_bias"),
        Uncompile(f"{fusions}.fused_bias_dropout", "bias_dropout_add_fused_train", "bias_dropout_add_fused_inference"),
        Uncompile(f"{fusions}.fused_bias_gelu", "bias_gelu", "bias_gelu_back"),
        Uncompile(f"{fusions}.fused_bias_geglu", "geglu", "bias_geglu", "geglu_back", "bias_geglu_back"),
        Uncompile(
            f"{fusions}.fused_bias_geglu",
            "quick_gelu",
            "quick_geglu",
            "quick_geglu_back",
            "weighted_quick_geglu",
            "weighted_quick_geglu_back",
            "weighted_bias_quick_geglu",
            "weighted_bias_quick_geglu_back",
        ),
        Uncompile(
            f"{fusions}.fused_bias_swiglu",
            "swiglu",
            "bias_swiglu",
            "weighted_swiglu",
            "swiglu_back",
            "bias_swiglu_back",
            "weighted_swiglu_back",
        ),
        Uncompile(
            f"{fusions}.fused_weighted_squared_relu",
            "weighted_squared_relu",
            "_squared_relu_back",
            "weighted_squared_relu_back",
        ),
        Uncompile(
            f"{fusions}.fused_cross_entropy",
            "calculate_logits_max",
            "calculate_predicted_logits",
            "calculate_cross_entropy_loss",
            "calculate_gradients",
        ),
    ]

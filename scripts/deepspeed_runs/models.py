"""Hugging Face MoE models with random weights, by family and size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Size:
    """Sizes that every family has under one name or another; ``groups`` of heads share keys (None: no two do)."""

    vocabulary: int = 64
    hidden: int = 32
    ffn: int = 48
    layers: int = 2
    heads: int = 2
    groups: int | None = None
    experts: int = 8
    top_k: int = 2
    positions: int = 64


def _mixtral(size: Size) -> Any:  # noqa: ANN401 - transformers' configurations
    from transformers import MixtralConfig

    return MixtralConfig(**_common(size), intermediate_size=size.ffn, num_local_experts=size.experts)


def _qwen3_moe(size: Size) -> Any:  # noqa: ANN401
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **_common(size),
        intermediate_size=size.ffn,
        moe_intermediate_size=size.ffn,
        num_experts=size.experts,
        norm_topk_prob=True,
        head_dim=size.hidden // size.heads,
        tie_word_embeddings=True,
    )


def _olmoe(size: Size) -> Any:  # noqa: ANN401
    from transformers import OlmoeConfig

    return OlmoeConfig(**_common(size), intermediate_size=size.ffn, num_experts=size.experts)


def _deepseek_v3(size: Size) -> Any:  # noqa: ANN401
    """One dense layer first, a shared expert beside the routed ones."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **_common(size),
        intermediate_size=size.ffn,
        moe_intermediate_size=size.ffn,
        n_routed_experts=size.experts,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )


def _gpt_oss(size: Size) -> Any:  # noqa: ANN401
    """Interleaved, transposed, clamped, with biases."""
    from transformers import GptOssConfig

    return GptOssConfig(
        **_common(size),
        intermediate_size=size.ffn,
        num_local_experts=size.experts,
        head_dim=size.hidden // size.heads,
        sliding_window=16,
    )


_CONFIGURATIONS = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
}
FAMILIES = tuple(_CONFIGURATIONS)


def _common(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.groups or size.heads,
        "num_experts_per_tok": size.top_k,
        "max_position_embeddings": size.positions,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def configuration(family: str, size: Size, *, experts_implementation: str | None = None) -> Any:  # noqa: ANN401
    """The transformers configuration of a family at a size.

    Raises:
        ValueError: an unknown family.
    """
    if family not in _CONFIGURATIONS:
        raise ValueError(f"model family {family!r} is unknown; there are {', '.join(FAMILIES)}")
    config = _CONFIGURATIONS[family](size)
    config._attn_implementation = "eager"
    if experts_implementation is not None:
        config._experts_implementation = experts_implementation
    return config


def build(config: Any, *, seed: int) -> torch.nn.Module:  # noqa: ANN401
    """A causal language model with random weights, without dropout; the random state is left as it was."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and "experts" in name:  # stock begins with zeros, which would prove little
                parameter.data.normal_(0.0, 0.02)
    return model.train()

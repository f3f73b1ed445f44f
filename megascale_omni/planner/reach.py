"""How much of a model can be tried where the probe runs, see [Note: miniature]."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from megascale_omni.paging.layout import MIB
from megascale_omni.planner.models import ModelCard

MOST_LAYERS = 4
EXPERT_BYTES = 256 * MIB
"""Weights of the experts that are made at most, one a layer at least; their other planes come on top."""

ACTIVATION_BYTES = 1024 * MIB
"""What forward keeps at most, where more than one layer is made."""

LAYER_ELEMENTS, HEAD_ELEMENTS = 128 << 20, 64 << 20
"""Dense parameters of several layers, and of embedding and output layer, at most."""

CPU_FLOPS = 2e11
"""Of a step's products at most where a processor makes them: some seconds."""

LEAST_TOKENS = 32
"""No sequence is made shorter."""

BYTES = 256
"""A vocabulary of so many tokens is one of bytes."""


def layers_made(card: ModelCard) -> int:
    """How many layers are made."""
    of_experts = EXPERT_BYTES // (card.expert.num_parameters * (2 if card.bf16 else 4))
    of_dense = LAYER_ELEMENTS // _layer_elements(card)
    return max(1, min(MOST_LAYERS, card.moe_layers, of_experts, of_dense, ACTIVATION_BYTES // _kept(card)))


def _layer_elements(card: ModelCard) -> int:
    """Of a layer's projections and router."""
    heads = card.attention
    return card.hidden_size * (2 * (heads.heads + heads.groups) * heads.channels + card.num_experts)


def _kept(card: ModelCard, *, scores: bool = True) -> int:
    """Bytes that forward keeps of a layer; ``scores``: those of attention as well, which a fused one does not keep."""
    size, sequences, length = 2 if card.bf16 else 4, card.micro_batch_size, card.seq_length
    of_scores = 3 * sequences * card.attention.heads * length**2 * 4 if scores else 0
    return of_scores + 17 * sequences * length * card.hidden_size * size


def in_reach(card: ModelCard, device: torch.device) -> ModelCard:
    """The card itself, or one of a model that can be tried in some seconds and GiB, see [Note: miniature]."""
    made = replace(card, vocabulary=min(card.vocabulary, max(BYTES, HEAD_ELEMENTS // (2 * card.hidden_size))))
    cpu = device.type == "cpu"

    def is_large() -> bool:
        tokens = made.micro_batch_size * made.seq_length
        kept = max(_kept(made, scores=cpu), 12 * tokens * made.vocabulary)
        of_layer = _layer_elements(made) + made.moe_router_topk * made.expert.num_parameters
        flops = 6.0 * tokens * (layers_made(made) * of_layer + 2 * made.vocabulary * made.hidden_size)
        return kept > ACTIVATION_BYTES or (cpu and flops > CPU_FLOPS)

    while is_large() and (made.micro_batch_size > 1 or made.seq_length >= 2 * LEAST_TOKENS):
        if made.micro_batch_size > 1:
            made = replace(made, micro_batch_size=made.micro_batch_size // 2)
        else:
            made = replace(made, seq_length=made.seq_length // 2)
    share = made.micro_batch_size * made.seq_length / (card.micro_batch_size * card.seq_length)
    return replace(made, num_experts=max(card.moe_router_topk, math.ceil(card.num_experts * share)))

"""What Megatron calls a model's tensors and how it fuses them, and what Hugging Face's models of the same layers have.

[Note: two names of a model]
    Megatron                                            Hugging Face
    embedding.word_embeddings.weight                    model.embed_tokens.weight
    decoder.final_layernorm.weight                      model.norm.weight
    output_layer.weight                                 lm_head.weight
    in decoder.layers.N.                                in model.layers.N.
    self_attention.linear_qkv.weight, bias              self_attn.{q,k,v}_proj, see [Note: fused attention]
    self_attention.linear_proj.weight, bias             self_attn.o_proj
    self_attention.q_layernorm.weight                   self_attn.q_norm.weight                            (and k)
    self_attention.linear_qkv.layer_norm_weight         input_layernorm.weight
    mlp.linear_fc1.layer_norm_weight                    post_attention_layernorm.weight
    mlp.linear_fc1.weight [2f, h], linear_fc2.weight    mlp.gate_proj above mlp.up_proj, mlp.down_proj
    mlp.router.weight, expert_bias                      mlp.gate.weight, e_score_correction_bias
    mlp.shared_experts.linear_fc1.weight, ...           mlp.shared_experts.gate_proj, ...
    with mlp.shared_experts.gate_weight                 mlp.shared_expert.gate_proj, ..., mlp.shared_expert_gate.weight
    mlp.experts                                         mlp.experts, pages in both
A tensor of moments or masters is cut as its weights are. Norms before a layer have a name of their own in Megatron
where they are not fused with what follows. Rows change places, nothing else: there and back is what was, bit for bit.

[Note: fused attention]
Megatron's rows are those of one group of queries after the other: its query heads, its key head, its value head.
Hugging Face has all query heads, all key heads, all value heads. Heads within a group keep their order.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


class Cut(enum.Enum):
    """How one tensor of Megatron's becomes several of Hugging Face's."""

    SAME = "same"
    HALVES = "halves"
    ATTENTION = "attention"


@dataclass(frozen=True)
class Attention:
    """Query heads, and groups of them that share a key and a value head."""

    heads: int
    groups: int

    def __post_init__(self) -> None:
        if self.groups < 1 or self.heads % self.groups:
            raise ValueError(f"{self.heads} attention heads cannot be divided into {self.groups} query groups")

    @classmethod
    def of_args(cls, args: Mapping[str, Any]) -> Attention:
        """From a Megatron run's arguments."""
        heads = int(args["num_attention_heads"])
        groups = args.get("num_query_groups") if args.get("group_query_attention") else None
        return cls(heads, heads if groups is None else int(groups))


@dataclass(frozen=True)
class Rule:
    """A tensor of Megatron's, in all spellings, and the tensors of Hugging Face's that it is fused of."""

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    cut: Cut = Cut.SAME


_MODEL = (
    Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",)),
    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",)),
    Rule(("output_layer.weight",), ("lm_head.weight",)),
)
_LAYER = (
    *(
        rule
        for kind in ("weight", "bias")
        for rule in (
            Rule(
                (f"self_attention.linear_qkv.{kind}",),
                tuple(f"self_attn.{part}_proj.{kind}" for part in "qkv"),
                Cut.ATTENTION,
            ),
            Rule((f"self_attention.linear_proj.{kind}",), (f"self_attn.o_proj.{kind}",)),
        )
    ),
    Rule(("self_attention.q_layernorm.weight",), ("self_attn.q_norm.weight",)),
    Rule(("self_attention.k_layernorm.weight",), ("self_attn.k_norm.weight",)),
    Rule(("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"), ("input_layernorm.weight",)),
    Rule(
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ("post_attention_layernorm.weight",),
    ),
    Rule(("mlp.linear_fc1.weight",), ("mlp.gate_proj.weight", "mlp.up_proj.weight"), Cut.HALVES),
    Rule(("mlp.linear_fc2.weight",), ("mlp.down_proj.weight",)),
    Rule(("mlp.router.weight",), ("mlp.gate.weight",)),
    Rule(("mlp.router.expert_bias",), ("mlp.gate.e_score_correction_bias",)),
    Rule(("mlp.shared_experts.gate_weight",), ("mlp.shared_expert_gate.weight",)),
)
_SHARED = {
    plural: (
        Rule(
            ("mlp.shared_experts.linear_fc1.weight",),
            (f"mlp.{name}.gate_proj.weight", f"mlp.{name}.up_proj.weight"),
            Cut.HALVES,
        ),
        Rule(("mlp.shared_experts.linear_fc2.weight",), (f"mlp.{name}.down_proj.weight",)),
    )
    for plural, name in ((True, "shared_experts"), (False, "shared_expert"))
}
_MEGATRON_LAYERS, _HF_LAYERS = "decoder.layers.", "model.layers."
_NUMBERED = re.compile(r"(\d+)\.(.*)")


class ModelNames:
    """The map of one model. ``gated_shared``: whether its shared experts have a gate, which says what they are called.

    Megatron's keys here have their layer's number in them (``decoder.layers.N.``).
    """

    def __init__(self, *, gated_shared: bool) -> None:
        layer = (*_LAYER, *_SHARED[not gated_shared])
        self.rules = (*_MODEL, *layer)
        self._of_megatron = {name: rule for rule in self.rules for name in rule.megatron}
        self._of_model = frozenset(name for rule in _MODEL for name in rule.megatron)

    def find(self, key: str) -> tuple[Rule, tuple[str, ...]] | None:
        """The rule for one of Megatron's keys, and the Hugging Face names it stands for; None where there is none."""
        if key in self._of_model:
            return self._of_megatron[key], self._of_megatron[key].hf
        match = _NUMBERED.fullmatch(key.removeprefix(_MEGATRON_LAYERS))
        if not key.startswith(_MEGATRON_LAYERS) or match is None or match[2] in self._of_model:
            return None
        rule = self._of_megatron.get(match[2])
        return None if rule is None else (rule, tuple(f"{_HF_LAYERS}{match[1]}.{name}" for name in rule.hf))


def path_in_hf(path: str) -> str:
    """Where Hugging Face's model has the experts that Megatron has at ``path``. ValueError where they are elsewhere."""
    match = _NUMBERED.fullmatch(path.removeprefix(_MEGATRON_LAYERS))
    if not path.startswith(_MEGATRON_LAYERS) or match is None or match[2] != "mlp.experts":
        raise ValueError(f"experts at {path} have no place in a Hugging Face model, only those at decoder.layers.N.mlp")
    return f"{_HF_LAYERS}{match[1]}.mlp.experts"


def split(rule: Rule, tensor: torch.Tensor, attention: Attention) -> list[torch.Tensor]:
    """The tensors that one of Megatron's is fused of, in the order of ``rule.hf``; not copied where they need not be.

    Raises:
        ValueError: rows that cannot be cut so.
    """
    if rule.cut is Cut.SAME:
        return [tensor]
    rows, rest = tensor.shape[0], tensor.shape[1:]
    if rule.cut is Cut.HALVES:
        if rows % 2:
            raise ValueError(f"{rule.megatron[0]} has {rows} rows: gate and up have as many each")
        return [tensor[: rows // 2], tensor[rows // 2 :]]
    queries = attention.heads // attention.groups
    head, left = divmod(rows, attention.groups * (queries + 2))
    if left:
        raise ValueError(
            f"{rule.megatron[0]} has {rows} rows: not those of {attention.heads} heads in {attention.groups} groups"
        )
    grouped = tensor.reshape(attention.groups, queries + 2, head, *rest)
    parts = grouped[:, :queries], grouped[:, queries : queries + 1], grouped[:, queries + 1 :]
    return [part.reshape(-1, *rest) for part in parts]


def fuse(rule: Rule, parts: Sequence[torch.Tensor], attention: Attention) -> torch.Tensor:
    """The inverse of :func:`split`.

    Raises:
        ValueError: parts that do not belong together.
    """
    if rule.cut is Cut.SAME:
        return parts[0]
    if rule.cut is Cut.HALVES:
        if parts[0].shape != parts[1].shape:
            raise ValueError(f"{rule.hf[0]} is {tuple(parts[0].shape)}, {rule.hf[1]} {tuple(parts[1].shape)}")
        return torch.cat(list(parts))
    rest = parts[0].shape[1:]
    head, left = divmod(parts[0].shape[0], attention.heads)
    wanted = (attention.groups * head, *rest)
    if left or any(tuple(part.shape) != wanted for part in parts[1:]):
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise ValueError(
            f"{', '.join(rule.hf)} are {shapes}, which is not {attention.heads} heads in {attention.groups} groups"
        )
    grouped = [part.reshape(attention.groups, -1, head, *rest) for part in parts]
    return torch.cat(grouped, dim=1).reshape(-1, *rest)

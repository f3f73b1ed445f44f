"""Model cards: the sizes of a model, from Megatron's argument names in YAML or JSON, or from Megatron's flags."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megascale_omni.paging.layout import ExpertShape

MOST_LAYERS = 10_000
"""Beyond all models; a plan goes through the layers one by one."""


@dataclass(frozen=True)
class Attention:
    """Heads of queries, groups of keys and values, channels of each."""

    heads: int
    groups: int
    channels: int


@dataclass(frozen=True)
class ModelCard:
    """What a plan needs to know of a model and its batch. Names are Megatron's, counts are of the whole model."""

    name: str
    num_layers: int
    hidden_size: int
    num_experts: int
    moe_router_topk: int
    moe_ffn_hidden_size: int
    moe_layers: int
    gated: bool
    expert_bias: bool
    attention: Attention
    rotary: bool
    vocabulary: int
    dense_parameters: int
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    bf16: bool
    recompute: bool
    clips: bool = True
    expert_parallel: int = 1
    pipeline_parallel: int = 1

    @property
    def expert(self) -> ExpertShape:
        """Sizes of one expert."""
        return ExpertShape(
            hidden=self.hidden_size, ffn=self.moe_ffn_hidden_size, gated=self.gated, bias=self.expert_bias
        )

    @property
    def expert_parameters(self) -> int:
        """Elements of all experts."""
        return self.moe_layers * self.num_experts * self.expert.num_parameters

    @property
    def parameters(self) -> int:
        """Elements of the model."""
        return self.dense_parameters + self.expert_parameters


def read_model(source: str) -> ModelCard:
    """From a file (YAML, JSON, or a text of flags) or from flags themselves (``"--num-layers 4 ..."``).

    Raises:
        ValueError: not readable; a model without experts; a size that is missing or no whole number.
    """
    path = Path(source)
    if source.lstrip().startswith("--"):
        return model_card(_flags(source), name="flags")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--from {source} cannot be read: {error}; give a YAML or JSON file of Megatron's argument names, "
            'or the flags: --from "--num-layers 4 ..."'
        ) from error
    if path.suffix == ".json":
        try:
            values: object = json.loads(text)
        except ValueError as error:
            raise ValueError(f"--from {source} is not JSON: {error}") from error
    elif path.suffix in (".yaml", ".yml"):
        import yaml

        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"--from {source} is not YAML: {' '.join(str(error).split())}") from error
    else:
        values = _flags(text)
    if not isinstance(values, Mapping):
        raise ValueError(f"--from {source} must hold 'name: value' settings")
    flat: dict[str, object] = {}
    for key, value in values.items():
        nested = isinstance(value, Mapping) and key in ("language_model", "model_parallel")
        flat |= dict(value) if nested and isinstance(value, Mapping) else {str(key): value}
    return model_card({str(k).replace("-", "_"): v for k, v in flat.items()}, name=path.stem)


def _flags(text: str) -> dict[str, object]:
    """``--name value`` and ``--switch`` of a command line; whatever is no flag is passed over."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ValueError(f"--from: these are no flags ({error}): {' '.join(text.split())[:80]}") from error
    found: dict[str, object] = {}
    for index, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        following = words[index + 1] if index + 1 < len(words) else "--"
        found[name.replace("-", "_")] = value if equals else True if following.startswith("--") else following
    return found


def _moe_layers(frequency: object, num_layers: int, *, name: str) -> int:
    """How many layers have experts, from ``moe_layer_freq``: every N-th, or a pattern such as ``[0]*3+[1]*58``."""
    if isinstance(frequency, str) and "[" in frequency:
        pattern: list[int] = []
        for part in frequency.replace(" ", "").split("+"):
            block, _, times = part.partition("*")
            try:
                pattern += [int(x) for x in block.strip("[]()").split(",")] * int(times or 1)
            except ValueError as error:
                raise ValueError(f"{name}: moe_layer_freq={frequency!r} is no number and no pattern") from error
    elif isinstance(frequency, list):
        pattern = [int(x) for x in frequency]
    else:
        every = _whole({"moe_layer_freq": frequency}, "moe_layer_freq", name=name)
        pattern = [int(layer % every == 0) for layer in range(num_layers)]
    if len(pattern) != num_layers:
        raise ValueError(f"{name}: moe_layer_freq speaks of {len(pattern)} layers, num_layers of {num_layers}")
    return sum(pattern)


def _whole(values: Mapping[str, object], key: str, *, name: str, default: int | None = None) -> int:
    value = values.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{name}: {key} is missing; a plan needs it")
    try:
        number = int(str(value))
    except ValueError as error:
        raise ValueError(f"{name}: {key}={value!r} is not a whole number") from error
    if number < 1:
        raise ValueError(f"{name}: {key}={value!r} must be 1 or more")
    return number


def _switch(values: Mapping[str, object], key: str, *, name: str, default: bool = False) -> bool:
    value = values.get(key)
    if value is None:
        return default
    known = {"true": True, "1": True, "false": False, "0": False}
    if str(value).lower() not in known:
        raise ValueError(f"{name}: {key}={value!r} is neither true nor false")
    return known[str(value).lower()]


def _refuse_layouts(values: Mapping[str, object], *, name: str) -> None:
    """Raises ValueError for layouts whose ranks a plan does not know: it would say what is not so."""
    for key in ("expert_tensor_parallel_size", "tensor_model_parallel_size", "context_parallel_size"):
        if _whole(values, key, name=name, default=1) > 1:
            raise ValueError(
                f"{name}: {key}={values[key]}: a plan knows no experts, dense parameters or sequences that are spread "
                "over ranks; plan with expert, data and pipeline parallelism, or with what one of those ranks has"
            )


def _number(values: Mapping[str, object], key: str, *, name: str, default: float) -> float:
    value = values.get(key, default)
    try:
        return float(str(value))
    except ValueError as error:
        raise ValueError(f"{name}: {key}={value!r} is not a number") from error


def model_card(values: Mapping[str, object], *, name: str) -> ModelCard:
    """From settings by Megatron's names. ``dense_parameters`` wins over counting the dense part.

    Raises:
        ValueError: see :func:`read_model`.
    """
    if values.get("num_experts") in (None, 0, "0"):
        raise ValueError(f"{name}: there are no experts (num_experts); a dense model has nothing to page")

    _refuse_layouts(values, name=name)

    def whole(key: str, default: int | None = None) -> int:
        return _whole(values, key, name=name, default=default)

    layers, hidden = whole("num_layers"), whole("hidden_size")
    if layers > MOST_LAYERS:
        raise ValueError(f"{name}: num_layers={layers} is more than a plan counts ({MOST_LAYERS})")
    gated = any(_switch(values, key, name=name) for key in ("swiglu", "quick_geglu", "gated_linear_unit"))
    bias = _switch(values, "add_bias_linear", name=name, default=True)
    bias = bias and not _switch(values, "disable_bias_linear", name=name)
    ffn = whole("ffn_hidden_size", int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden)
    moe_layers = _moe_layers(values.get("moe_layer_freq", 1), layers, name=name)
    if not moe_layers:
        raise ValueError(f"{name}: no layer has experts (moe_layer_freq={values['moe_layer_freq']}); give one some")
    experts, topk = whole("num_experts"), whole("moe_router_topk", 2)
    if topk > experts:
        raise ValueError(f"{name}: moe_router_topk={topk} is more than num_experts={experts}")
    micro = whole("micro_batch_size", 1)
    batch = whole("global_batch_size", micro)
    if batch % micro:
        raise ValueError(f"{name}: global_batch_size={batch} cannot be divided by micro_batch_size={micro}")
    card = ModelCard(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_experts=experts,
        moe_router_topk=topk,
        moe_ffn_hidden_size=whole("moe_ffn_hidden_size", ffn),
        moe_layers=moe_layers,
        gated=gated,
        expert_bias=bias,
        attention=_attention(values, hidden, name=name),
        rotary=values.get("position_embedding_type", "learned_absolute") in ("rope", "yarn", "mrope"),
        vocabulary=_vocabulary(values, name=name),
        dense_parameters=1,
        seq_length=whole("seq_length", 4096),
        micro_batch_size=micro,
        global_batch_size=batch,
        bf16=_switch(values, "bf16", name=name),
        recompute=values.get("recompute_granularity") == "full",
        clips=_number(values, "clip_grad", name=name, default=1.0) > 0.0,
        expert_parallel=whole("expert_model_parallel_size", 1),
        pipeline_parallel=whole("pipeline_model_parallel_size", 1),
    )
    dense = values.get("dense_parameters")
    counted = _dense(values, card, ffn=ffn, name=name) if dense is None else whole("dense_parameters")
    return ModelCard(**{**card.__dict__, "dense_parameters": counted})


def _attention(values: Mapping[str, object], hidden: int, *, name: str) -> Attention:
    """Where there are no heads (the dense part is given as a number), of 64 channels each."""
    given = values.get("dense_parameters") is not None
    heads = _whole(values, "num_attention_heads", name=name, default=max(1, hidden // 64) if given else None)
    grouped = _switch(values, "group_query_attention", name=name)
    groups = _whole(values, "num_query_groups", name=name, default=heads) if grouped else heads
    if heads % groups:
        raise ValueError(f"{name}: num_attention_heads={heads} cannot be divided by num_query_groups={groups}")
    channels = _whole(values, "kv_channels", name=name, default=max(1, hidden // heads))
    return Attention(heads=heads, groups=groups, channels=channels)


def _vocabulary(values: Mapping[str, object], *, name: str) -> int:
    """As it is padded."""
    multiple = _whole(values, "make_vocab_size_divisible_by", name=name, default=128)
    return -(-_whole(values, "vocab_size", name=name, default=256) // multiple) * multiple


def _dense(values: Mapping[str, object], card: ModelCard, *, ffn: int, name: str) -> int:
    """Parameters outside the experts: embeddings, attention, norms, routers, shared experts, dense layers."""

    def whole(key: str, default: int | None = None) -> int:
        return _whole(values, key, name=name, default=default)

    h, layers = card.hidden_size, card.num_layers
    heads, groups, channels = card.attention.heads, card.attention.groups, card.attention.channels
    bias = int(card.expert_bias)
    norm = h if values.get("normalization") == "RMSNorm" else 2 * h
    width = (heads + 2 * groups) * channels
    attention = h * width + heads * channels * h + bias * (width + h)
    attention += 2 * channels if _switch(values, "qk_layernorm", name=name) else 0
    feed = ExpertShape(hidden=h, ffn=ffn, gated=card.gated, bias=bool(bias)).num_parameters
    shared = 0
    if values.get("moe_shared_expert_intermediate_size") is not None:
        shared_ffn = whole("moe_shared_expert_intermediate_size")
        shared = ExpertShape(hidden=h, ffn=shared_ffn, gated=card.gated, bias=bool(bias)).num_parameters
    embeddings = card.vocabulary * h * (1 + _switch(values, "untie_embeddings_and_output_weights", name=name))
    if values.get("position_embedding_type", "learned_absolute") == "learned_absolute":
        embeddings += whole("max_position_embeddings", card.seq_length) * h
    router = card.num_experts * h
    return (
        embeddings
        + layers * (attention + 2 * norm)
        + norm
        + card.moe_layers * (router + shared)
        + (layers - card.moe_layers) * feed
    )

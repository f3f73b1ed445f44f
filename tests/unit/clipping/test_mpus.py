"""Which module a parameter belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale_omni.clipping.mpus import default_mpus, mpus_for, mpus_from_patterns

# Beginnings of names of well-known models, and where they belong.
MULTIMODAL = {
    "llava": {
        "model.vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight": "encoder",
        "model.multi_modal_projector.linear_1.weight": "aligner",
        "model.language_model.layers.3.self_attn.q_proj.weight": "generator",
        "lm_head.weight": "generator",
    },
    "qwen-vl": {
        "model.visual.blocks.0.attn.qkv.weight": "encoder",
        "model.visual.merger.mlp.0.weight": "aligner",
        "model.language_model.layers.0.mlp.experts.gate_up_proj": "experts",
        "model.language_model.layers.0.mlp.gate.weight": "generator",
        "model.language_model.embed_tokens.weight": "generator",
    },
    "internvl": {
        "vision_model.encoder.layers.0.norm1.weight": "encoder",
        "mlp1.1.weight": "aligner",
        "language_model.model.layers.0.mlp.up_proj.weight": "generator",
    },
    "minicpm-v": {
        "vpm.encoder.layers.0.mlp.fc1.weight": "encoder",
        "resampler.attn.in_proj_weight": "aligner",
        "llm.model.layers.0.mlp.up_proj.weight": "generator",
    },
    "megatron-llava": {
        "vision_model.decoder.layers.0.mlp.linear_fc1.weight": "encoder",
        "vision_projection.encoder.linear_fc1.weight": "aligner",
        "language_model.decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight": "experts",
        "language_model.encoder.final_norm.weight": "generator",
    },
}


@pytest.mark.parametrize("model", MULTIMODAL)
def test_parts_of_multimodal_models_are_found_by_name(model):
    names = MULTIMODAL[model]
    mpus = default_mpus(names)
    assert {name: mpus.names[mpus.index(name)] for name in names} == names
    assert list(mpus.names) == [n for n in ("encoder", "aligner", "generator", "experts") if n in names.values()]


def gpt(layers: int) -> list[str]:
    kinds = ("self_attention.linear_qkv.weight", "mlp.router.weight", "mlp.experts.local_experts.0.linear_fc1.weight")
    inner = [f"decoder.layers.{layer}.{kind}" for layer in range(layers) for kind in kinds]
    return ["embedding.word_embeddings.weight", *inner, "decoder.final_layernorm.weight", "output_layer.weight"]


@pytest.mark.parametrize(("layers", "starts"), [(1, [0]), (2, [0, 1]), (4, [0, 1, 2, 3]), (10, [0, 2, 5, 7])])
def test_a_mixture_of_experts_is_cut_into_dense_and_experts_by_blocks(layers, starts):
    mpus = default_mpus(gpt(layers))
    assert list(mpus.names) == ["embedding", *(f"{kind}_{s}" for s in starts for kind in ("dense", "experts"))]
    last = f"decoder.layers.{layers - 1}."
    assert mpus.names[mpus.index(f"{last}mlp.router.weight")] == f"dense_{starts[-1]}"
    assert mpus.names[mpus.index(f"{last}mlp.experts.local_experts.7.linear_fc2.weight")] == f"experts_{starts[-1]}"
    assert mpus.names[mpus.index("output_layer.weight")] == "embedding"


def test_a_translator_is_not_multimodal_and_words_inside_of_layers_mean_nothing():
    translator = ["encoder.layers.0.fc.weight", "decoder.layers.0.fc.weight", "shared.weight"]
    assert "encoder" not in default_mpus(translator).names
    assert default_mpus([*gpt(2), "decoder.layers.1.mlp1.weight"]).names[0] == "embedding"


def test_a_model_without_layers_is_one_module():
    mpus = default_mpus(["0.weight", "0.bias"])
    assert mpus.names == ("model",)
    assert mpus.index("anything") == 0


def test_the_first_pattern_decides_and_the_rest_is_a_module():
    names = ["vision.a.weight", "vision.b.weight", "text.weight", "other.bias"]
    mpus = mpus_from_patterns({"vision.a.*": "special", "vision.*": "vision", "text*": "text"}, names)
    assert mpus.names == ("special", "vision", "text", "rest")
    assert [mpus.names[mpus.index(n)] for n in names] == ["special", "vision", "text", "rest"]
    assert mpus_from_patterns({"*": "all"}, names).names == ("all",)
    several = {"vision.*": "big", "vision.a.*": "big", "text*": "text", "*": "big"}
    assert mpus_from_patterns(several, names).names == ("big", "text"), "a pattern may be idle, a module may not"
    assert mpus_from_patterns({"vision.*": "vision", "vision.a.*": "rest"}, names).names == ("vision", "rest")


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({}, r"clip\.mpus is empty"),
        ({"audio.*": "audio"}, r"no parameter matches 'audio\.\*' \(audio\); a parameter's name is text\.weight"),
        (
            {"*": "all", "text.*": "text"},
            r"all parameters that 'text\.\*' \(text\) matches are taken by patterns before it; the first that matches",
        ),
        ({"text.*": 3}, r"'text\.\*': 3 must be a pattern of parameter names and a name"),
    ],
)
def test_patterns_that_cannot_be_meant(patterns, message):
    with pytest.raises(ValueError, match=message):
        mpus_from_patterns(patterns, ["text.weight"])


def test_a_parameter_that_was_not_known_and_has_no_module_is_an_error():
    mpus = mpus_from_patterns({"text.*": "text"}, ["text.weight"])
    with pytest.raises(ValueError, match=r"parameter late\.weight belongs to no module; known modules: text"):
        mpus.index("late.weight")


def test_patterns_from_a_file(tmp_path: Path):
    path = tmp_path / "mpus.yaml"
    path.write_text("vision.*: encoder\n'*': generator\n")
    mpus = mpus_for(str(path), ["vision.weight", "text.weight"])
    assert mpus.names == ("encoder", "generator")
    path.write_text("- a\n")
    with pytest.raises(ValueError, match="must hold a mapping of patterns to modules, not list"):
        mpus_for(str(path), ["vision.weight"])
    with pytest.raises(ValueError, match="cannot be read"):
        mpus_for(str(tmp_path / "none.yaml"), ["vision.weight"])

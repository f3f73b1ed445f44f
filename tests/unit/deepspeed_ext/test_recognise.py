"""Stock experts modules are described by what they compute; what pages do not compute is refused by name."""

import pytest
import torch
from transformers.activations import ACT2FN

from deepspeed_ext.recognise import describe, is_hf_experts
from megascale_omni.experts.activation import Activation
from scripts.deepspeed_runs.models import FAMILIES, Size, build, configuration

EXPECTED = {
    "mixtral": ("hf", Activation("silu", gated=True)),
    "qwen3_moe": ("hf", Activation("silu", gated=True)),
    "olmoe": ("hf", Activation("silu", gated=True)),
    "deepseek_v3": ("hf", Activation("silu", gated=True)),
    "gpt_oss": ("hf_gpt_oss", Activation("quick_gelu", gated=True, clamp=7.0, offset=1.0, alpha=1.702)),
}


def experts_of(family: str) -> dict[str, torch.nn.Module]:
    model = build(configuration(family, Size(experts=4)), seed=1)
    return {path: module for path, module in model.named_modules() if is_hf_experts(module)}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    found = experts_of(family)
    assert len(found) == (1 if family == "deepseek_v3" else 2)  # whose first layer is dense
    for path, module in found.items():
        described = describe(path, module)
        assert (described.style, described.activation) == EXPECTED[family]
        assert described.num_experts == 4
        assert (described.shape.hidden, described.shape.ffn) == (32, 48)
        assert described.shape.bias == (family == "gpt_oss")
        assert described.trainable


def test_shared_experts_are_no_experts() -> None:
    assert not any("shared" in path for path in experts_of("deepseek_v3"))


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", "relu", "relu2"])
def test_other_activations(name: str) -> None:
    ((path, module), *_) = experts_of("mixtral").items()
    module.act_fn = ACT2FN[name]
    kinds = {"gelu_pytorch_tanh": "gelu_tanh", "relu2": "squared_relu"}
    assert describe(path, module).activation == Activation(kinds.get(name, name), gated=True)  # type: ignore[arg-type]


def test_ungated_experts() -> None:
    ((path, module), *_) = experts_of("mixtral").items()
    module.up_proj, module.act_fn = module.gate_up_proj, ACT2FN["relu2"]
    setattr(module, "has_gate", False)  # noqa: B010 - torch types attributes of modules as tensors
    del module.gate_up_proj
    described = describe(path, module)
    assert described.activation == Activation("squared_relu", gated=False)
    assert described.shape.ffn == 96


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m, "act_fn", torch.nn.Tanh()), "its activation .* is not one"),
        (lambda m: setattr(m, "has_post_expert_norm", True), "a norm after each expert"),
        (lambda m: setattr(m, "scale", torch.nn.Parameter(torch.ones(1))), "has the parameters .*scale"),
        (lambda m: m.down_proj.requires_grad_(False), "some of its tensors are frozen"),
        (lambda m: setattr(m, "_is_expert_parallel", True), "divided among ranks by transformers already"),
    ],
)
def test_what_pages_do_not_compute_is_refused(change, message: str) -> None:
    ((path, module), *_) = experts_of("mixtral").items()
    change(module)
    with pytest.raises(ValueError, match=message):
        describe(path, module)

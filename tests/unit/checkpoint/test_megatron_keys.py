"""What Megatron calls things, there and back."""

import random

import numpy as np
import pytest
import torch

from megascale_omni.checkpoint import rng
from megascale_omni.checkpoint.megatron_keys import (
    StockOptimizer,
    experts_key,
    is_stacked,
    key_of_experts,
    rng_as_stock,
    rng_of_stock,
)

WEIGHTS = {"lr": 0.1, "betas": (0.9, 0.95), "wd_mult": 1.0, "is_decoupled_lr": False}
BIASES = {**WEIGHTS, "wd_mult": 0.0}


@pytest.mark.parametrize(
    ("key", "path", "layer"),
    [
        ("decoder.layers.mlp.experts.experts.linear_fc1.weight", "decoder.layers.5.mlp.experts", 5),
        ("decoder.layers.3.mlp.experts.experts.linear_fc2.bias", "decoder.layers.3.mlp.experts", 3),
    ],
)
def test_keys_of_experts(key, path, layer):
    found = experts_key(key)
    assert found is not None
    assert found.path(layer) == path
    assert key_of_experts(path, found.name, stacked=found.stacked) == (key, layer)


def test_keys_of_others():
    assert experts_key("decoder.layers.mlp.shared_experts.linear_fc1.weight") is None
    assert is_stacked("decoder.layers.input_layernorm.weight")
    assert not is_stacked("decoder.layers.0.input_layernorm.weight")
    assert not is_stacked("embedding.word_embeddings.weight")
    with pytest.raises(ValueError, match=r"experts at encoder\.experts are in no numbered layer"):
        key_of_experts("encoder.experts", "", stacked=True)


@pytest.mark.parametrize("form", ["fp32", "float16", "distributed"])
@pytest.mark.parametrize("separate", [False, True])
def test_the_optimizer_comes_back(form, separate):
    groups = [[WEIGHTS, BIASES]] * (2 if separate else 1)
    stock = StockOptimizer(form, separate, groups, steps=7, clipping={"alpha": 0.5})
    assert StockOptimizer.of_stock(stock.as_stock(), form) == stock


def test_the_experts_groups_are_told_apart():
    stock = StockOptimizer("fp32", True, [[BIASES], [BIASES, WEIGHTS]], steps=1)
    assert stock.experts_groups(bias=True) == [WEIGHTS, BIASES]
    assert stock.experts_groups(bias=False) == [WEIGHTS]
    with pytest.raises(ValueError, match="which of 2 parameter groups the experts' weights are in cannot be told"):
        StockOptimizer("fp32", False, [[WEIGHTS, {**WEIGHTS, "lr_mult": 2.0}]], steps=1).experts_groups(bias=False)


def test_random_numbers_come_back():
    random.gauss(0, 1)
    np.random.rand(3)
    states = {**rng.capture(), "tracker.expert": torch.get_rng_state()}
    there = rng_as_stock(states)
    assert there["random_rng_state"] == random.getstate()
    back = rng_of_stock(there)
    assert back.keys() == states.keys()
    for name, state in states.items():
        assert torch.equal(back[name], state), name

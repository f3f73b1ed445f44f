"""What the experts module itself refuses, whoever builds it."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP, TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec

import megatron_ext
from megatron_ext import support
from megatron_ext.activation import activation_of
from megatron_ext.experts import MegaScaleExperts
from megatron_ext.layer import NO_OPTIMIZER
from tests.distributed.megatron_state import fresh_parallel_state
from tests.unit.megatron_ext.layers import build, tokens, transformer_config
from tests.unit.megatron_ext.two_sides import EVERYWHERE


def config(**more: Any) -> Any:
    return transformer_config(ep=1, bias=False, gated=True, dtype=torch.float32, dispatcher="alltoall", **more)


@pytest.mark.parametrize("stock", [GroupedMLP, TEGroupedMLP])
def test_other_experts_classes(stock: type) -> None:
    for spec in (stock, ModuleSpec(module=stock)):
        with pytest.raises(ValueError, match=rf"{stock.__name__} is not supported .*leave out --moe-grouped-gemm"):
            MegaScaleExperts(4, config(), stock_spec=spec, runtime=megatron_ext.enable())


def test_a_class_derived_from_sequential_mlp_may_compute_anything() -> None:
    class Changed(SequentialMLP):
        pass

    with pytest.raises(ValueError, match="Changed is not supported with --megascale"):
        MegaScaleExperts(4, config(), stock_spec=ModuleSpec(module=Changed), runtime=megatron_ext.enable())


def test_an_activation_that_pages_do_not_know() -> None:
    changed = config()
    changed.activation_func = F.elu
    with pytest.raises(ValueError, match=r"activation_func=elu is not supported .*gelu, .*silu"):
        activation_of(changed)


@pytest.mark.parametrize(
    ("option", "groups"), [("expert_model_parallel_size", (2, 1)), ("expert_tensor_parallel_size", (1, 4))]
)
def test_process_groups_of_other_sizes_than_the_configuration_says(option: str, groups: tuple[int, int]) -> None:
    """Stock trains on, and averages gradients of different experts."""
    ep, expt_tp = (types.SimpleNamespace(size=lambda size=size: size) for size in groups)
    with pytest.raises(ValueError, match=rf"{option}=1 .* have {max(groups)} ranks.*same size"):
        support.check_groups(config(), types.SimpleNamespace(ep=ep, expt_tp=expt_tp))


def train_without_optimizer(rank: int, world: int) -> None:
    fresh_parallel_state()
    side = build(megascale=True)
    told = side.layer._runtime.told
    side.train((tokens(5, seed=0), EVERYWHERE))
    assert NO_OPTIMIZER not in told
    side.layer.experts.adam = None  # as where the loop has an optimizer of its own
    with torch.no_grad():
        side.forward(tokens(5, seed=1), EVERYWHERE)
    assert NO_OPTIMIZER not in told
    side.clear()
    side.forward_backward(tokens(5, seed=1), EVERYWHERE)
    assert NO_OPTIMIZER in told


def test_experts_that_nothing_steps_are_warned_of(pools):
    pools[1].run(train_without_optimizer)


def refuse_after_building(rank: int, world: int) -> None:
    fresh_parallel_state()
    side = build(megascale=True)
    with pytest.raises(ValueError, match=r"cannot change from torch\.float32 to torch\.bfloat16 .*params_dtype"):
        side.layer.bfloat16()
    names = [tensor.name for tensor in side.layer.experts.names.tensors()]
    with pytest.raises(RuntimeError, match=r"shape \(2, 2\) does not fit, the model has"):
        side.layer.experts.load_state_dict({name: torch.zeros(2, 2) for name in names})
    with pytest.raises(ValueError, match="not supported with --megascale"):
        side.optimizer.offload_to_cpu()
    for state_file in (side.optimizer.save_parameter_state, side.optimizer.load_parameter_state):
        with pytest.raises(ValueError, match="--ckpt-format torch is not supported"):
            state_file("file")
    with pytest.raises(RuntimeError, match="stepped by MegaScaleChainedOptimizer only"):
        side.optimizer.paged.step()


def test_what_cannot_be_done_with_built_experts(pools):
    pools[1].run(refuse_after_building)


def build_unwrapped(rank: int, world: int) -> None:
    from megatron.core import optimizer

    fresh_parallel_state()
    side = build(megascale=True)
    settings = optimizer.OptimizerConfig(optimizer="adam", lr=1e-3)
    megatron_ext.enable()
    try:
        with pytest.raises(
            ValueError, match=r"has a chunk \(OneLayer\) without megatron\.core's DistributedDataParallel"
        ):
            optimizer.get_megatron_optimizer(settings, [side.ddp.module])
    finally:
        megatron_ext.disable()


def test_a_model_without_its_wrapper_would_not_be_trained(pools):
    pools[1].run(build_unwrapped)


def enable_late(rank: int, world: int) -> None:
    from megatron.core import distributed, optimizer

    fresh_parallel_state()
    side = build(megascale=False)
    settings = optimizer.OptimizerConfig(optimizer="adam", lr=1e-3)
    megatron_ext.enable()
    try:
        wrapped_late = distributed.DistributedDataParallel(side.ddp.config, side.ddp.ddp_config, side.ddp.module)
        for chunk in (side.ddp, wrapped_late):
            with pytest.raises(ValueError, match=r"built before MegaScale was enabled, .* before the model is built"):
                optimizer.get_megatron_optimizer(settings, [chunk])
    finally:
        megatron_ext.disable()


def test_a_model_that_was_built_before_would_train_stocks_experts(pools):
    pools[1].run(enable_late)


def swap_state_dicts(rank: int, world: int) -> None:
    """Plain state dicts, as scripts of their own save them, go both ways and have stock's names."""
    fresh_parallel_state()
    for options in ({"bias": True, "gated": False}, {"bf16": True, "page_size": "64KiB"}):
        stock, paged = build(megascale=False, **options), build(megascale=True, **options)
        with torch.no_grad():
            for parameter in stock.ddp.parameters():
                parameter.normal_()
        theirs = stock.layer.experts.state_dict()
        paged.layer.experts.load_state_dict(theirs, strict=True)
        ours = paged.layer.experts.state_dict()
        tensors = {name: value for name, value in theirs.items() if isinstance(value, torch.Tensor)}
        assert list(ours) == list(tensors), "same names in the same order"
        assert all(torch.equal(ours[name], tensor) for name, tensor in tensors.items())
        fresh = build(megascale=False, **options)
        fresh.layer.experts.load_state_dict(ours, strict=True)
        assert all(
            torch.equal(first, second)
            for first, second in zip(fresh.layer.experts.parameters(), stock.layer.experts.parameters(), strict=True)
        )
        missing = {name: tensor for name, tensor in ours.items() if "local_experts.2." not in name}
        with pytest.raises(RuntimeError, match=r"Missing key.*local_experts\.2\.linear_fc1\.weight"):
            paged.layer.experts.load_state_dict(missing, strict=True)
        with pytest.raises(RuntimeError, match=r"Unexpected key.*surprise"):
            paged.layer.experts.load_state_dict({**ours, "surprise": torch.zeros(1)}, strict=True)


def test_plain_state_dicts_have_stocks_names_and_go_both_ways(pools):
    pools[1].run(swap_state_dicts)


def list_parameters(rank: int, world: int) -> None:
    fresh_parallel_state()
    stock, paged = build(megascale=False, bias=True), build(megascale=True, bias=True)
    names = [(name, parameter.shape) for name, parameter in stock.ddp.named_parameters()]
    hidden = [name for name, _ in paged.ddp.named_parameters()]
    with paged.layer.experts.visible():
        assert [(name, parameter.shape) for name, parameter in paged.ddp.named_parameters()] == names
    assert [name for name, _ in paged.ddp.named_parameters()] == hidden
    assert not [name for name in hidden if "experts" in name]
    assert paged.layer.experts.parameter_count() == sum(p.numel() for p in stock.layer.experts.parameters())
    norm = sum(float(p.double().square().sum()) for p in stock.layer.experts.parameters())
    assert paged.layer.experts.squared_parameter_norm() == pytest.approx(norm, rel=1e-6)


def test_stand_ins_are_listed_as_stock_lists_parameters_and_only_while_asked_for(pools):
    pools[1].run(list_parameters)

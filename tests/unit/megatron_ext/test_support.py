"""What MegaScale refuses of stock: every row, by flag, value and remedy, wherever the option is set."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import CudaGraphScope
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_ext
from megatron_ext import support
from megatron_ext.distributed import MegaScaleDDP
from megatron_ext.layer import MegaScaleMoELayer
from megatron_ext.optimizer import build_optimizer
from megatron_ext.support import REFUSALS, Refusal

BAD_VALUES: dict[str, object] = {
    "fp8": "hybrid",
    "fp4": "e2m1",
    "moe_latent_size": 64,
    "num_distributed_optimizer_instances": 2,
    "optimizer": "sgd",
    "loss_scale": 1024.0,
    "gtp_weight_remat_size": 2,
    "expert_gtp_weight_remat_size": 2,
}
"""A refused value of every option that is no switch."""

GOOD_VALUES: dict[str, object] = {"optimizer": "adam"}
STOCK = {"model": TransformerConfig, "ddp": DistributedDataParallelConfig, "optimizer": OptimizerConfig}
OF_MEGATRON_LM = {
    "moe_use_upcycling",
    "use_torch_fsdp2",
    "freeze_all_layers",
    "freeze_LM",
    "check_weight_hash_across_dp_replicas_interval",
    "gtp_weight_remat_size",
    "expert_gtp_weight_remat_size",
    "ckpt_convert_format",
    "inprocess_restart",
}
"""Flags of Megatron-LM that no configuration object of megatron-core has."""
OF_MAIN = {"overlap_dispatch_backward_with_experts_wgrad", "mtp_detach_heads"}
"""Options that came after 0.16.1."""

every_row = pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: f"{refusal.where}-{refusal.option}")


def bad_value(refusal: Refusal) -> object:
    return BAD_VALUES.get(refusal.option, True)


def arguments(**changed: object) -> argparse.Namespace:
    """Parsed flags of Megatron-LM that are fine, with changes."""
    fine = {"megascale": True, "num_experts": 8, "optimizer": "adam", "expert_model_parallel_size": 2}
    return argparse.Namespace(**{**fine, **changed})


def expected(refusal: Refusal) -> str:
    flag = "--" + refusal.option.replace("_", "-")
    value = repr(bad_value(refusal))
    return re.escape(f"{flag} ({refusal.option}={value}) is not supported with --megascale; {refusal.remedy}")


def use(where: str, options: Any) -> None:
    """What a script of its own would call first with its configuration object."""
    if where == "model":
        MegaScaleMoELayer(options)
    elif where == "ddp":
        MegaScaleDDP(None, options, None)  # type: ignore[arg-type]
    elif where == "optimizer":
        build_optimizer(lambda *given: given, options, [object.__new__(MegaScaleDDP)])  # type: ignore[arg-type, return-value]
    else:
        support.check(where, options)


class TestEveryRow:
    @every_row
    def test_as_a_flag(self, refusal: Refusal) -> None:
        with pytest.raises(ValueError, match=expected(refusal)):
            megatron_ext.enable_from_args(arguments(**{refusal.option: bad_value(refusal)}))
        assert not megatron_ext.is_enabled()

    @every_row
    def test_as_an_option_of_stock(self, refusal: Refusal) -> None:
        """On the configuration objects that scripts of their own build."""
        options = SimpleNamespace(**{refusal.option: bad_value(refusal)})
        with pytest.raises(ValueError, match=expected(refusal)):
            use(refusal.where, options)

    @every_row
    def test_what_is_not_set_passes(self, refusal: Refusal) -> None:
        for value in (None, GOOD_VALUES.get(refusal.option, False)):
            support.check_arguments(arguments(**{refusal.option: value}))

    @every_row
    def test_the_option_exists_in_stock(self, refusal: Refusal) -> None:
        if refusal.where == "arguments":
            assert refusal.option in OF_MEGATRON_LM
            return
        there = {field.name for field in dataclasses.fields(STOCK[refusal.where])}
        if megatron.core.__version__ == "0.16.1":
            assert (refusal.option in there) == (refusal.option not in OF_MAIN)
        else:
            assert refusal.option in there | OF_MAIN

    def test_stocks_defaults_pass_but_for_one(self) -> None:
        """gradient_accumulation_fusion is off in megatron-core's configuration and on among Megatron-LM's flags."""
        config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, num_moe_experts=4)
        support.check("model", config)
        support.check("ddp", DistributedDataParallelConfig())
        support.check("optimizer", OptimizerConfig(optimizer="adam"))
        support.check_arguments(arguments())


class TestGraphs:
    @pytest.mark.parametrize("scope", ["attn", ["attn", "mlp"], [CudaGraphScope.attn], [CudaGraphScope.mamba]])
    @pytest.mark.parametrize("impl", ["local", "transformer_engine"])
    def test_graphs_without_experts_are_allowed_and_said(self, impl: str, scope: object) -> None:
        options = arguments(cuda_graph_impl=impl, cuda_graph_scope=scope)
        said = support.graphs_said(options, pages_leave=False)
        assert said is not None
        assert said.endswith("; experts are computed outside of them")
        with pytest.raises(ValueError, match=rf"--cuda-graph-impl {impl} is not supported with --megascale-device-bu"):
            support.graphs_said(options, pages_leave=True)

    @pytest.mark.parametrize(
        "scope", [None, "", [], "full", "full_iteration", "attn,moe", ["moe_router"], [CudaGraphScope.moe_preprocess]]
    )
    def test_graphs_that_would_hold_experts_are_refused(self, scope: object) -> None:
        with pytest.raises(ValueError, match=r"--cuda-graph-scope .* is not supported with --megascale: a graph would"):
            megatron_ext.enable_from_args(arguments(cuda_graph_impl="local", cuda_graph_scope=scope))
        assert not megatron_ext.is_enabled()

    def test_without_graphs_nothing_is_said(self) -> None:
        for impl in (None, "none"):
            options = arguments(cuda_graph_impl=impl, cuda_graph_scope="full")
            assert support.graphs_said(options, pages_leave=True) is None

    def test_stocks_own_configuration_is_read(self) -> None:
        config = TransformerConfig(
            num_layers=2, hidden_size=64, num_attention_heads=4, num_moe_experts=4, cuda_graph_impl="local",
            cuda_graph_scope="attn",
        )  # fmt: skip
        assert "hold attn;" in str(support.graphs_said(config, pages_leave=False))
        config.cuda_graph_scope = []
        with pytest.raises(ValueError, match="--cuda-graph-scope full"):
            support.graphs_said(config, pages_leave=False)


class TestOtherRefusals:
    def test_biases_of_experts_under_tensor_parallelism(self) -> None:
        cut = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
        support.check_arguments(arguments(**cut, add_bias_linear=False))
        with pytest.raises(
            ValueError, match=r"tensor-model-parallel-size 2 and experts with biases.*disable-bias-linear"
        ):
            support.check_arguments(arguments(**cut, add_bias_linear=True))

    def test_a_dense_model(self) -> None:
        with pytest.raises(
            ValueError, match="needs a mixture-of-experts model: give --num-experts, or leave --megascale"
        ):
            megatron_ext.enable_from_args(arguments(num_experts=None))
        assert not megatron_ext.is_enabled()

    def test_experts_that_ranks_cannot_share(self) -> None:
        with pytest.raises(ValueError, match=r"--num-experts 8 cannot be divided by --expert-model-parallel-size 3"):
            support.check_arguments(arguments(expert_model_parallel_size=3))

    def test_experts_spread_over_ranks(self) -> None:
        spread = {"expert_tensor_parallel_size": 2, "add_bias_linear": False}
        support.check_arguments(arguments(tensor_model_parallel_size=2, add_bias_linear=False))
        support.check_arguments(arguments(**spread, expert_model_parallel_size=2))
        support.check_arguments(arguments(**spread, tensor_model_parallel_size=2, expert_model_parallel_size=1))
        with pytest.raises(ValueError, match=r"--expert-tensor-parallel-size 2 with --tensor-model-parallel-size 1"):
            support.check_arguments(arguments(**spread, expert_model_parallel_size=1))
        with pytest.raises(ValueError, match=r"--expert-tensor-parallel-size 2 and experts with biases"):
            support.check_arguments(arguments(**{**spread, "add_bias_linear": True}, expert_model_parallel_size=2))

    @pytest.mark.parametrize("where", ["save", "load"])
    def test_layouts_of_checkpoints(self, where: str) -> None:
        checkpoints = {where: "folder", "use_distributed_optimizer": True}
        with pytest.raises(ValueError, match=r"needs --dist-ckpt-optim-fully-reshardable.*\(dp_reshardable\)"):
            support.check_arguments(arguments(**checkpoints))
        support.check_arguments(arguments(**checkpoints, dist_ckpt_optim_fully_reshardable=True))
        support.check_arguments(arguments(use_distributed_optimizer=True))
        support.check_arguments(arguments(**{where: "folder"}))
        with pytest.raises(ValueError, match=r"--ckpt-format torch is not supported .* use --ckpt-format torch_dist"):
            support.check_arguments(arguments(**{where: "folder", "ckpt_format": "torch"}))
        support.check_arguments(arguments(**{where: "folder", "ckpt_format": "torch_dist"}))

    def test_layouts_of_stock_do_not_matter_to_the_paged_format_however_it_is_asked_for(self, tmp_path: Path) -> None:
        file = tmp_path / "options.json"
        file.write_text('{"checkpoint": {"format": "paged"}}')
        own = {"save": "folder", "use_distributed_optimizer": True, "megascale_config": str(file)}
        assert megatron_ext.enable_from_args(arguments(**own)) is not None
        megatron_ext.disable()
        with pytest.raises(ValueError, match=r"--non-persistent-save-interval is not supported with .* paged"):
            megatron_ext.enable_from_args(arguments(**own, non_persistent_save_interval=2))

"""Paged experts beside the real SequentialMLP: the same names in the same order, the same outputs and gradients."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from megascale_omni.experts.activation import Activation
from megascale_omni.paging.layout import ExpertShape, PageLayout
from megascale_omni.paging.names import NamedTensors
from tests.distributed.megatron_state import fresh_parallel_state
from tests.unit.experts.paged import FFN, HIDDEN, Batch, grad_of, leaf, paged, random_batch, small_experts
from tests.unit.experts.reference import Tensors, reference, relative_error

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")

COUNTS = (40, 0, 130, 3)


def stock_experts(*, gated: bool, bias: bool, dtype: torch.dtype) -> torch.nn.Module:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=len(COUNTS),
        moe_ffn_hidden_size=FFN,
        gated_linear_unit=gated,
        activation_func=F.silu if gated else F.gelu,
        add_bias_linear=bias,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
    )
    spec = get_moe_module_spec(use_te=False, num_experts=len(COUNTS), moe_grouped_gemm=False)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    experts = build_module(spec.submodules.experts, len(COUNTS), config, pg_collection=groups)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    return experts


def stock_results(experts: torch.nn.Module, batch: Batch) -> Tensors:
    x, probs = leaf(batch.x), leaf(batch.probs)
    y, bias = experts(x, torch.tensor(batch.counts), probs)
    assert bias is None
    y.backward(batch.grad_y)
    weights = {name: grad_of(parameter) for name, parameter in experts.named_parameters()}
    return {"y": y.detach(), "x": grad_of(x), "probs": grad_of(probs)} | weights


def compare(rank: int, world: int, gated: bool, bias: bool, dtype: torch.dtype) -> tuple[list, list, dict, dict]:
    """Names and shapes of stock and ours; errors of ours and of the control against products in fp32."""
    fresh_parallel_state()
    stock = stock_experts(gated=gated, bias=bias, dtype=dtype)
    weights = {name: parameter.detach() for name, parameter in stock.named_parameters()}
    layout = PageLayout(ExpertShape(hidden=HIDDEN, ffn=FFN, gated=gated, bias=bias), 16)
    names = NamedTensors(layout=layout, num_experts=len(COUNTS), style="sequential")
    activation = Activation("silu" if gated else "gelu", gated=gated)
    ours = small_experts(activation, bias=bias, dtype=dtype)
    ours.load_dense(weights)
    batch = random_batch(COUNTS, probs=torch.float32, dtype=dtype)
    truth = reference(weights, batch.x, COUNTS, batch.probs, batch.grad_y, activation, dtype=torch.float64)

    def errors(results: Tensors) -> dict[str, float]:
        return {name: relative_error(results[name], truth[name]) for name in truth}

    return (
        [(name, tuple(tensor.shape)) for name, tensor in weights.items()],
        [(tensor.name, tensor.shape) for tensor in names.tensors()],
        errors(stock_results(stock, batch)),
        errors(paged(ours, batch)),
    )


@pytest.mark.parametrize(
    ("gated", "bias", "dtype"), list(itertools.product([True, False], [True, False], [torch.float32, torch.bfloat16]))
)
def test_paged_experts_are_as_exact_as_stock_under_the_names_of_stock(pools, gated, bias, dtype):
    for stock, ours, stock_errors, our_errors in pools[2].run(compare, gated=gated, bias=bias, dtype=dtype):
        assert ours == stock
        assert max(stock_errors.values()) > 0
        bound = {name: 1.5 * error if dtype is torch.bfloat16 else 1e-5 for name, error in stock_errors.items()}
        assert {name: error for name, error in our_errors.items() if not error <= bound[name]} == {}

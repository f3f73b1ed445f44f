"""Experts computed by kernels are the experts that autograd computes."""

import pytest
import torch

from megascale_omni.experts.activation import Activation
from megascale_omni.experts.triton_backend import TritonBackend
from tests.unit.experts.paged import FFN, GELU, SWIGLU, paged, random_batch, small_experts
from tests.unit.experts.reference import reference, relative_error

CPU = torch.device("cpu")
CLAMPED = Activation("quick_gelu", gated=True, clamp=0.5, offset=1.0)


@pytest.mark.parametrize("rows", [16, FFN, 20])
@pytest.mark.parametrize("activation", [SWIGLU, GELU, CLAMPED], ids=["swiglu", "gelu", "clamped"])
def test_fp32_is_what_autograd_computes(activation, rows):
    batch = random_batch((5, 0, 17, 3))
    experts = small_experts(activation, rows=rows, bias=True, backend=TritonBackend(CPU))
    expected = reference(experts.dense(), batch.x, batch.counts, batch.probs, batch.grad_y, activation)
    found = paged(experts, batch)
    assert found.keys() == expected.keys()
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    assert {name: error for name, error in errors.items() if not error <= 1e-5} == {}

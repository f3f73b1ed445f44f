"""Activations by page have the bits that autograd gives for the plain expression, forward and backward."""

import itertools
import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from megascale_omni.experts.activation import Activation, Kind
from megascale_omni.experts.workspace import Workspace

KINDS: tuple[Kind, ...] = get_args(Kind)
UNGATED = [Activation(kind, gated=False) for kind in KINDS]
GATED = [
    Activation(kind, gated=True, clamp=clamp, offset=offset)
    for kind, clamp, offset in itertools.product(KINDS, (None, 1.5), (0.0, 1.0))
]
DTYPES = (torch.float32, torch.bfloat16)
SIZES = ((0, 8), (1, 1), (1, 64), (3, 5), (17, 48), (5, 333))


def label(value) -> str:
    if isinstance(value, Activation):
        parts = (value.kind, "gated" if value.gated else "", f"clamp{value.clamp}" if value.clamp else "")
        return "-".join(part for part in (*parts, "offset" if value.offset else "") if part)
    return str(value).removeprefix("torch.")


def stock(h: torch.Tensor, activation: Activation, probs: torch.Tensor | None = None) -> torch.Tensor:
    """The expression, one torch operator after the other."""
    functions: dict[Kind, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "quick_gelu": lambda x: x * torch.sigmoid(activation.alpha * x),
        "relu": F.relu,
        "squared_relu": lambda x: torch.pow(F.relu(x), 2),
    }
    act = functions[activation.kind]
    if activation.gated:
        gate, up = torch.chunk(h, 2, dim=-1)
        if activation.clamp is not None:
            gate = gate.clamp(min=None, max=activation.clamp)
            up = up.clamp(min=-activation.clamp, max=activation.clamp)
        y = act(gate) * (up + activation.offset)
    else:
        y = act(h)
    return y if probs is None else (y * probs.unsqueeze(-1)).to(h.dtype)


def assert_same(actual: torch.Tensor | None, expected: torch.Tensor | None, what: str) -> None:
    """Both are there and bit-equal but for the sign of zeros; NaN is NaN."""
    assert actual is not None and expected is not None, what  # noqa: PT018
    assert actual.dtype is expected.dtype, f"{what}: {actual.dtype} and {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} and {tuple(expected.shape)}"
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    assert bool(same.all()), f"{what}: {int((~same).sum())} of {same.numel()} elements differ"


def block(n: int, r: int, activation: Activation, dtype: torch.dtype) -> torch.Tensor:
    """Pre-activations of both signs, some zero, some just on the clamp, some far out."""
    h = 2 * torch.randn(n, 2 * r if activation.gated else r)
    for value in (0.0, 1.5, -1.5, 30.0, -200.0):
        h[torch.rand(h.shape) < 0.03] = value
    return h.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=label)
@pytest.mark.parametrize("activation", UNGATED + GATED, ids=label)
def test_forward_and_backward_without_probs(activation, dtype):
    for n, r in SIZES:
        h = block(n, r, activation, dtype).requires_grad_()
        expected = stock(h, activation)
        grad = torch.randn(n, r).to(dtype)
        expected.backward(grad)
        kept = (h.detach().clone(), grad.clone())
        assert_same(activation.forward(h.detach()), expected.detach(), f"y {n}x{r}")
        assert_same(activation.backward(h.detach(), grad), h.grad, f"grad of h {n}x{r}")
        assert_same(h.detach(), kept[0], "h was changed")
        assert_same(grad, kept[1], "grad was changed")


@pytest.mark.parametrize("probs_dtype", DTYPES, ids=label)
@pytest.mark.parametrize("dtype", DTYPES, ids=label)
@pytest.mark.parametrize("activation", UNGATED + GATED, ids=label)
def test_forward_and_backward_with_probs(activation, dtype, probs_dtype):
    work = Workspace(torch.device("cpu"))
    for n, r in SIZES:
        h = block(n, r, activation, dtype).requires_grad_()
        probs = torch.rand(n).to(probs_dtype).requires_grad_()
        expected = stock(h, activation, probs)
        grad = torch.randn(n, r).to(dtype)
        expected.backward(grad)
        plain_h, plain_probs = h.detach(), probs.detach()
        out, activated = torch.empty_like(plain_h), torch.empty_like(grad)
        act = activation.with_probs_forward(plain_h, plain_probs, out=activated, workspace=work)
        assert act is activated
        assert_same(activated, expected.detach(), f"a {n}x{r}")
        grad_h, grad_probs = activation.with_probs_backward(plain_h, plain_probs, grad)
        assert_same(grad_h, h.grad, f"grad of h {n}x{r}")
        assert_same(grad_probs, probs.grad, f"grad of probs {n}x{r}")
        # The same with everything lent, recomputed and overwritten.
        activated.fill_(math.nan)
        grad_h, grad_probs = activation.with_probs_backward(
            plain_h, plain_probs, grad.clone(), out=out, activated=activated, overwrite_grad=True, workspace=work
        )
        assert grad_h is out
        assert_same(out, h.grad, f"grad of h {n}x{r}, buffers lent")
        assert_same(grad_probs, probs.grad, f"grad of probs {n}x{r}, buffers lent")
        assert_same(activated, expected.detach(), f"a {n}x{r}, recomputed")


@pytest.mark.parametrize("activation", UNGATED + GATED, ids=label)
def test_options_do_not_change_bits(activation):
    """Whatever is asked for besides, the gradient of h is the same; what is not asked for is not there."""
    h, grad, probs = block(9, 40, activation, torch.float32), torch.randn(9, 40), torch.rand(9)
    work = Workspace(torch.device("cpu"))
    expected, grad_probs = activation.with_probs_backward(h, probs, grad)
    assert grad_probs is not None
    for need, recompute in itertools.product((False, True), (False, True)):
        activated = torch.empty_like(grad) if recompute else None
        got, got_probs = activation.with_probs_backward(
            h, probs, grad, activated=activated, need_grad_probs=need, workspace=work
        )
        assert_same(got, expected, f"need_grad_probs={need} recompute={recompute}")
        assert (got_probs is not None) is need
        if activated is not None:
            assert_same(activated, activation.with_probs_forward(h, probs), "recomputed")
    got, got_probs = activation.with_probs_backward(h, None, grad, activated=(plain := torch.empty_like(grad)))
    assert got_probs is None
    assert_same(got, activation.backward(h, grad), "without probs")
    assert_same(plain, activation.forward(h), "recomputed without probs")


@pytest.mark.parametrize("dtype", DTYPES, ids=label)
@pytest.mark.parametrize("activation", UNGATED + GATED, ids=label)
def test_large_blocks_split_over_threads(activation, dtype):
    n, r = 70, 512
    h = block(n, r, activation, dtype).requires_grad_()
    probs = torch.rand(n).requires_grad_()
    expected = stock(h, activation, probs)
    grad = torch.randn(n, r).to(dtype)
    expected.backward(grad)
    assert_same(activation.with_probs_forward(h.detach(), probs.detach()), expected.detach(), "a")
    grad_h, grad_probs = activation.with_probs_backward(h.detach(), probs.detach(), grad)
    assert_same(grad_h, h.grad, "grad of h")
    assert_same(grad_probs, probs.grad, "grad of probs")


@pytest.mark.parametrize("activation", UNGATED + GATED, ids=label)
def test_non_finite_values_do_what_autograd_does(activation):
    h = block(4, 16, activation, torch.float32)
    h[0, ::3], h[1, ::3], h[2, ::5] = math.nan, math.inf, -math.inf
    h.requires_grad_()
    probs = torch.rand(4).requires_grad_()
    grad = torch.randn(4, 16)
    grad[3, :4] = torch.tensor([math.nan, math.inf, -math.inf, 3e38])
    expected = stock(h, activation, probs)
    expected.backward(grad)
    assert_same(activation.with_probs_forward(h.detach(), probs.detach()), expected.detach(), "a")
    grad_h, grad_probs = activation.with_probs_backward(h.detach(), probs.detach(), grad)
    assert_same(grad_h, h.grad, "grad of h")
    assert_same(grad_probs, probs.grad, "grad of probs")


@pytest.mark.parametrize("activation", [a for a in UNGATED + GATED if "relu" not in a.kind], ids=label)
def test_gradients_against_finite_differences(activation):
    """Independent of torch's own derivatives, in fp64, off the corners that clamping makes."""
    h = torch.randn(3, 8 if activation.gated else 4, dtype=torch.float64)
    h[(h.abs() - 1.5).abs() < 1e-3] = 0.5
    probs, grad = torch.rand(3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)

    def loss(h: torch.Tensor, probs: torch.Tensor) -> float:
        return float((activation.with_probs_forward(h, probs) * grad).sum())

    grad_h, grad_probs = activation.with_probs_backward(h, probs, grad)
    assert grad_probs is not None
    for tensor, found in ((h, grad_h), (probs, grad_probs)):
        for i in range(tensor.numel()):
            step = torch.zeros_like(tensor)
            step.view(-1)[i] = 1e-6
            moved = [(h + s * step, probs) if tensor is h else (h, probs + s * step) for s in (1, -1)]
            slope = (loss(*moved[0]) - loss(*moved[1])) / 2e-6
            assert abs(slope - float(found.view(-1)[i])) < 1e-6


def test_gpt_oss_by_hand():
    activation = Activation("quick_gelu", gated=True, clamp=7.0, offset=1.0)
    h = torch.tensor([[8.0, -9.0, 0.5, 2.0]])  # gates 8 and -9, ups 0.5 and 2
    sigmoid = [1 / (1 + math.exp(-1.702 * gate)) for gate in (7.0, -9.0)]
    expected = torch.tensor([[7.0 * sigmoid[0] * 1.5, -9.0 * sigmoid[1] * 3.0]])
    torch.testing.assert_close(activation.forward(h), expected)
    gradient = activation.backward(h, torch.ones(1, 2))
    assert gradient[0, 0] == 0.0, "a clamped gate has no gradient"
    torch.testing.assert_close(gradient[0, 2], torch.tensor(7.0 * sigmoid[0]))


def test_a_lent_workspace_stops_growing():
    work = Workspace(torch.device("cpu"))
    activation = Activation("quick_gelu", gated=True, clamp=7.0, offset=1.0)
    sizes = []
    for n in (32, 7, 32, 0, 19):
        h = torch.randn(n, 64).bfloat16()
        activation.with_probs_forward(h, torch.rand(n), workspace=work)
        activation.with_probs_backward(h, torch.rand(n), torch.randn(n, 32).bfloat16(), workspace=work)
        sizes.append(work.nbytes)
    assert len(set(sizes)) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kind": "swish", "gated": True}, "'swish' is unknown"),
        ({"kind": "silu", "gated": False, "clamp": 7.0}, "clamp=7.0"),
        ({"kind": "silu", "gated": False, "offset": 1.0}, "offset=1.0"),
        ({"kind": "silu", "gated": True, "clamp": 0.0}, "clamp 0.0"),
        ({"kind": "silu", "gated": True, "clamp": math.nan}, "clamp nan"),
        ({"kind": "silu", "gated": True, "offset": math.inf}, "offset inf"),
        ({"kind": "quick_gelu", "gated": True, "alpha": math.nan}, "alpha nan"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        Activation(**arguments)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"h_nR": torch.zeros(4)}, "2-D"),
        ({"h_nR": torch.zeros(8, 4).t()}, "contiguous"),
        ({"h_nR": torch.zeros(4, 8, dtype=torch.int32)}, "int32"),
        ({"h_nR": torch.zeros(4, 7)}, "7 columns"),
        ({"grad_nr": torch.zeros(4, 8)}, r"grad must be contiguous torch.float32 of shape \(4, 4\)"),
        ({"grad_nr": torch.zeros(4, 4, dtype=torch.bfloat16)}, "not torch.bfloat16"),
        ({"out": torch.zeros(4, 4)}, r"out must be .* \(4, 8\)"),
        ({"activated": torch.zeros(4, 8)[:, :4]}, "activated must be contiguous"),
        ({"probs_n": torch.zeros(4, 1)}, "one a token"),
        ({"probs_n": torch.zeros(4, dtype=torch.int64)}, "int64"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, said):
    activation = Activation("silu", gated=True)
    arguments = {"h_nR": torch.zeros(4, 8), "probs_n": torch.zeros(4), "grad_nr": torch.zeros(4, 4), **change}
    with pytest.raises(ValueError, match=said):
        activation.with_probs_backward(**arguments)

"""The activation between an expert's two products, as functions on tiles for other kernels.

The same expressions, rounded at the same points, as ``megascale_omni/experts/activation.py``: an intermediate that a
torch operator would write in bf16 is rounded to bf16 here, too (``DTYPE``), and computed on in fp32. Only the last bits
of exp and erf are the device's own.
"""

import triton
import triton.language as tl


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """``x`` (fp32) as it is after a visit to memory in ``DTYPE``."""
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def act(x, KIND: tl.constexpr, ALPHA: tl.constexpr, DTYPE: tl.constexpr):
    """``act(x)``, rounded; shapes and kinds as in the torch implementation."""
    tl.static_assert(
        KIND == "silu"
        or KIND == "gelu"
        or KIND == "gelu_tanh"
        or KIND == "quick_gelu"
        or KIND == "relu"
        or KIND == "squared_relu"
    )
    if KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":  # (1 + tanh(u)) / 2 = sigmoid(2 u)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "quick_gelu":
        y = x * rounded(tl.sigmoid(rounded(ALPHA * x, DTYPE)), DTYPE)
    elif KIND == "relu":
        y = tl.where(x < 0.0, 0.0, x)
    else:
        positive = tl.where(x < 0.0, 0.0, x)
        y = positive * positive
    return rounded(y, DTYPE)


@triton.jit
def act_backward(x, grad, KIND: tl.constexpr, ALPHA: tl.constexpr, DTYPE: tl.constexpr):
    """``grad * act'(x)``, rounded."""
    if KIND == "silu":
        s = tl.sigmoid(x)
        y = grad * s * (1.0 + x * (1.0 - s))
    elif KIND == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        y = grad * (cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x))
    elif KIND == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        y = grad * (s + x * s * (1.0 - s) * slope)
    elif KIND == "quick_gelu":
        s = rounded(tl.sigmoid(rounded(ALPHA * x, DTYPE)), DTYPE)
        through = rounded(rounded(x * grad, DTYPE) * (1.0 - s) * s, DTYPE)
        y = rounded(grad * s, DTYPE) + rounded(through * ALPHA, DTYPE)
    elif KIND == "relu":
        y = tl.where(x <= 0.0, 0.0, grad)
    else:
        y = tl.where(x <= 0.0, 0.0, rounded(rounded(2.0 * x, DTYPE) * grad, DTYPE))
    return rounded(y, DTYPE)


@triton.jit
def clamped_gate(gate, CLAMP: tl.constexpr):
    """The gate, bounded from above where the activation clamps; NaN stays NaN."""
    if CLAMP is not None:
        gate = tl.where(gate > CLAMP, CLAMP, gate)
    return gate


@triton.jit
def shifted_up(up, CLAMP: tl.constexpr, OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """What the activated gate is multiplied by: ``clip(up) + offset``."""
    if CLAMP is not None:
        up = tl.where(up > CLAMP, CLAMP, tl.where(up < -CLAMP, -CLAMP, up))
    if OFFSET != 0.0:
        up = rounded(up + OFFSET, DTYPE)
    return up


@triton.jit
def gated(
    gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, CLAMP: tl.constexpr, OFFSET: tl.constexpr, DTYPE: tl.constexpr
):
    """``act(min(gate, clamp)) * (clip(up, -clamp, clamp) + offset)``, rounded."""
    left = act(clamped_gate(gate, CLAMP), KIND, ALPHA, DTYPE)
    return rounded(left * shifted_up(up, CLAMP, OFFSET, DTYPE), DTYPE)


@triton.jit
def gated_backward(
    gate,
    up,
    grad,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    CLAMP: tl.constexpr,
    OFFSET: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Gradients of gate and up, given that of :func:`gated`; none where clamping changed a value."""
    bounded = clamped_gate(gate, CLAMP)
    grad_up = rounded(act(bounded, KIND, ALPHA, DTYPE) * grad, DTYPE)
    grad_act = rounded(shifted_up(up, CLAMP, OFFSET, DTYPE) * grad, DTYPE)
    grad_gate = act_backward(bounded, grad_act, KIND, ALPHA, DTYPE)
    if CLAMP is not None:
        grad_gate = tl.where(gate <= CLAMP, grad_gate, 0.0)
        grad_up = tl.where(tl.abs(up) <= CLAMP, grad_up, 0.0)
    return grad_gate, grad_up

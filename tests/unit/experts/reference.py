"""Slow, readable experts: plain autograd, a loop over experts, stock tensors by name. What paged experts must equal.

Shapes: tokens x [N, h] sorted by expert, counts[e] of them for expert e, probs [N]; an expert has linear_fc1.weight
[(M-1) f, h] (gate rows, then up rows), linear_fc2.weight [h, f] and, with biases, linear_fc1.bias and linear_fc2.bias.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from megascale_omni.experts.activation import Activation

Tensors = dict[str, torch.Tensor]


def activate(h: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``act(gate) * (up + offset)`` after clamping where gated, else ``act(h)``; ``h`` is [n, R]."""
    x, up = h.chunk(2, dim=-1) if activation.gated else (h, None)
    if up is not None and activation.clamp is not None:
        x, up = x.clamp(max=activation.clamp), up.clamp(-activation.clamp, activation.clamp)
    y = {
        "silu": lambda: F.silu(x),
        "gelu": lambda: F.gelu(x),
        "gelu_tanh": lambda: F.gelu(x, approximate="tanh"),
        "quick_gelu": lambda: x * torch.sigmoid(activation.alpha * x),
        "relu": lambda: F.relu(x),
        "squared_relu": lambda: F.relu(x) ** 2,
    }[activation.kind]()
    return y if up is None else y * (up + activation.offset)


def one_expert(
    weights: Tensors, x: torch.Tensor, probs: torch.Tensor | None, activation: Activation, parts: int
) -> torch.Tensor:
    """One expert's output [n, h]; with ``parts`` > 1 as a sum over so many ranges of its neurons."""
    bias = weights.get("linear_fc1.bias")
    f = weights["linear_fc2.weight"].shape[1]
    outputs = []
    for neurons in torch.arange(f).chunk(parts):
        rows = torch.cat([neurons, neurons + f]) if activation.gated else neurons
        h = F.linear(x, weights["linear_fc1.weight"][rows])
        if bias is not None:
            h = h + bias[rows]  # a rounding of its own in bf16, as stock's
        y = activate(h, activation)
        if probs is not None:
            y = (y * probs[:, None]).to(x.dtype)
        outputs.append(F.linear(y, weights["linear_fc2.weight"][:, neurons]))
    output = sum(outputs[1:], start=outputs[0])
    if "linear_fc2.bias" in weights:
        down_bias = weights["linear_fc2.bias"]
        output = (output + (down_bias if probs is None else down_bias * probs[:, None])).to(x.dtype)
    return output


def experts_forward(
    weights: Tensors,
    x: torch.Tensor,
    counts: Sequence[int],
    probs: torch.Tensor | None,
    activation: Activation,
    parts: int = 1,
) -> torch.Tensor:
    """Outputs [N, h] of all experts, one after the other; ``weights`` by the names of SequentialMLP."""
    outputs, start = [], 0
    for expert, count in enumerate(counts):
        prefix = f"local_experts.{expert}."
        own = {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}
        rows = slice(start, start + count)
        outputs.append(one_expert(own, x[rows], None if probs is None else probs[rows], activation, parts))
        start += count
    return torch.cat(outputs)


def reference(
    weights: Tensors,
    x: torch.Tensor,
    counts: Sequence[int],
    probs: torch.Tensor | None,
    grad_y: torch.Tensor,
    activation: Activation,
    *,
    dtype: torch.dtype | None = None,
    parts: int = 1,
) -> Tensors:
    """Output ``y`` and the gradients of ``x``, ``probs`` and every weight by name; computed in ``dtype`` if given."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(dtype or tensor.dtype, copy=True).requires_grad_()

    leaves = {name: leaf(tensor) for name, tensor in weights.items()}
    inputs = {"x": leaf(x)} | ({} if probs is None else {"probs": leaf(probs)})
    y = experts_forward(leaves, inputs["x"], counts, inputs.get("probs"), activation, parts)
    y.backward(grad_y.to(y.dtype))
    result = {"y": y.detach()}
    for name, tensor in (inputs | leaves).items():
        result[name] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
    return result


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference in units of the expected norm; 0 where both are zero, inf where only one is."""
    actual, expected = actual.double(), expected.double()
    difference, norm = float((actual - expected).norm()), float(expected.norm())
    return difference / norm if norm else (0.0 if difference == 0.0 else float("inf"))

"""A groups dispatcher around small paged experts without a training framework, beside all experts on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megascale_omni.groups.channel import Channel
from megascale_omni.groups.dispatch import GroupDispatcher, GroupOptions
from tests.unit.experts.paged import HIDDEN, drop_gradients, gradients, small_experts

LOCAL = 2


class GroupSide:
    """Two experts a rank, and what they must compute: the same experts, all on one rank."""

    def __init__(self, channel: Channel, options: GroupOptions, *, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(99)
        kind = {"bias": dtype is not torch.float32, "dtype": dtype, "gradient_dtype": torch.float32}
        self.whole = small_experts(num_experts=LOCAL * channel.size, **kind)  # type: ignore[arg-type]
        self.local = small_experts(num_experts=LOCAL, **kind)  # type: ignore[arg-type]
        weights = self.whole.dense()
        first = channel.rank * LOCAL
        mine = {n: weights[_renamed(n, first)] for n in self.local.dense()}
        self.local.load_dense(mine)
        self.dispatcher = GroupDispatcher(channel, LOCAL * channel.size, options=options, experts=self.local)
        self._first = first

    def step(self, map_TE: torch.Tensor, *, seed: int) -> dict[str, float]:
        """A forward and backward; how far output and gradients are from what one rank alone computes."""
        generator = torch.Generator().manual_seed(seed)
        x_Th = torch.randn(len(map_TE), HIDDEN, generator=generator)
        probs_TE = torch.rand(map_TE.shape, generator=generator)
        ours = self.dispatched(x_Th.clone().requires_grad_(), map_TE, probs_TE.clone().requires_grad_())
        alone = self.alone(x_Th.clone().requires_grad_(), map_TE, probs_TE.clone().requires_grad_())
        found = gradients(self.local)
        expected = gradients(self.whole)
        for name in expected:
            dist.all_reduce(expected[name])
        difference = {n: _worst(a, b) for n, a, b in zip(("output", "tokens", "probs"), ours, alone, strict=True)}
        for name, tensor in found.items():
            difference[name] = _worst(tensor, expected[self.whole_name(name)])
        drop_gradients(self.local)
        drop_gradients(self.whole)
        return difference

    def whole_name(self, name: str) -> str:
        """What one of this rank's tensors is called among all experts'."""
        return _renamed(name, self._first)

    def dispatched(self, x: torch.Tensor, map_TE: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        trip = self.dispatcher.depart(x, map_TE, probs)
        x_Nh, counts, probs_N = trip.arrive()
        output = trip.back(self.local(x_Nh, counts, probs_N))
        return _backward(output, x, probs)

    def alone(self, x: torch.Tensor, map_TE: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        expert_N, token_N = map_TE.t().nonzero(as_tuple=True)
        y_Nh = self.whole(x[token_N], map_TE.sum(0).tolist(), probs[token_N, expert_N])
        output = torch.zeros_like(x).index_add(0, token_N, y_Nh)
        return _backward(output, x, probs)


def _backward(output: torch.Tensor, x: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    output.backward(gradient_of(output))
    assert x.grad is not None
    assert probs.grad is not None
    return output.detach(), x.grad, probs.grad


def gradient_of(output: torch.Tensor) -> torch.Tensor:
    """What comes back to an output."""
    return torch.linspace(-1.0, 1.5, max(output.numel(), 2))[: output.numel()].view_as(output).to(output.dtype)


def _renamed(name: str, first: int) -> str:
    kind, expert, rest = name.split(".", 2)
    return f"{kind}.{int(expert) + first}.{rest}"


def _worst(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours - expected).abs().max()) if ours.numel() else 0.0


def random_map(tokens: int, experts: int, *, seed: int) -> torch.Tensor:
    """``[T, E]``: about a third of all pairs."""
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed)) < 0.35

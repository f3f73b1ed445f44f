"""Gradients of experts as stock's own norm takes them, so that it has stock's bits.

[Note: the last bit of the norm]
Gradients are multiplied by `clip / norm`. In fp32 the last bit of the norm stays one. In bf16 it moves a few masters
across the border between two weights of 8 bits, and after some steps losses differ as they do between any two orders of
sums, by some 1e-5. So stock's own functions add up the norm, tensor after tensor in stock's order, and a paged expert
takes part with one-element tensors: the norm of one element is that element. It is exact where the expert is one page
and its gradient is whole on this rank; other pages take part with their own norms, which are as good, and may differ in
the last bit. Only on a CPU: an accelerator's stock sums by kernels of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.shards import PageName, PageShards

Listed = tuple[PagedExperts, str] | None
"""A parameter of stock's list: a tensor of paged experts by name, or any other."""


@dataclass(frozen=True)
class NormParts:
    """What paged experts contribute to a norm.

    ``listed``: all parameters of the optimizer that would step the experts, in stock's order.
    """

    gradients: Sequence[ExpertGradients]
    shards: PageShards
    listed: Sequence[Listed]
    device: torch.device

    def of_experts(self) -> list[torch.Tensor]:
        """One-element tensors, in the order of the list."""
        return [part for part in self._parts() if part is not None]

    def beside(self, dense: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same among dense gradients, which take the other places of the list; behind them where some have none."""
        if sum(entry is None for entry in self.listed) != len(dense):
            return [*dense, *self.of_experts()]
        others = iter(dense)
        found = (next(others) if entry is None else part for entry, part in zip(self.listed, self._all(), strict=True))
        return [part for part in found if part is not None]

    def _parts(self) -> Iterator[torch.Tensor | None]:
        return (part for entry, part in zip(self.listed, self._all(), strict=True) if entry is not None)

    def _all(self) -> Iterator[torch.Tensor | None]:
        """For each entry of the list its part; None where there is none, or where another entry has it."""
        measured = {e: chunk.norms(e, self.shards) for chunk in self.gradients for e in chunk.modules}
        place_of = {experts: _places(experts) for experts in measured}
        owned = {experts: set(self.shards.owned(experts)) for experts in measured}
        for entry in self.listed:
            if entry is None:
                yield None
                continue
            experts, name = entry
            expert, place = place_of[experts][name]
            norm = _norm(experts, measured[experts], owned[experts], expert=expert, place=place)
            yield None if norm is None else torch.tensor([norm], dtype=torch.float32, device=self.device)


def _places(experts: PagedExperts) -> dict[str, tuple[int, int]]:
    """By name of a tensor: its expert, and its place among that expert's tensors."""
    names = [tensor.name for tensor in experts.names.tensors()]
    each = len(names) // experts.num_experts
    return {name: divmod(index, each) for index, name in enumerate(names)}


def _norm(
    experts: PagedExperts,
    measured: dict[PageName, tuple[float, ...]],
    owned: set[PageName],
    *,
    expert: int,
    place: int,
) -> float | None:
    """The norm of a tensor, or, for the first of an expert, of all that was not measured by tensor."""
    pages = [(expert, slice_) for slice_ in range(experts.layout.num_slices) if (expert, slice_) in owned]
    found = [measured[page] for page in pages if measured.get(page)]
    if not pages:
        return None
    if not found:
        return 0.0  # as stock's gradient of an expert without tokens
    if len(pages) == 1 and len(found[0]) > 1:
        return found[0][place]
    return math.sqrt(math.fsum(norm**2 for norms in found for norm in norms)) if place == 0 else None


def norm_of(gradients: list[torch.Tensor], group: dist.ProcessGroup) -> float:
    """Stock's norm of the gradients of all ranks of ``group``. A collective."""
    return float(get_grad_norm_fp32(gradients, grad_stats_parallel_group=group))


def gradients_for_norm(member: MegatronOptimizer) -> list[torch.Tensor]:
    """What an optimizer of stock's takes into its norm; the method's name differs between releases."""
    ask = getattr(member, "get_main_grads_for_grad_norm", None) or member.get_grads_for_grad_norm
    found: list[torch.Tensor] = ask()
    return found

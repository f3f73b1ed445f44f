"""Adam in the bits of torch's foreach kernels on CUDA, on the device and in host memory alike.

[Note: one arithmetic on two processors]
On CUDA torch.optim steps all tensors with its foreach kernels. Their compiler contracts every product that is followed
by a sum to one fused multiply-add, and division and square root round correctly:

    m = fma(1 - beta1, g - m, m)                  (beta1 <= 1/2: fma(g - m, -beta1, g))
    v = fma(1 - beta2, g * g, beta2 * v)
    p = fma(-lr / (1 - beta1^t), m / (sqrt(v) / sqrt(1 - beta2^t) + eps), p)

All of these are operations that IEEE 754 defines, so that any processor with fused multiply-add has the same bits: a
page may be stepped where it lies. In host memory torch's vectorised ``lerp_`` and ``add_(alpha)`` are such operations
(checked once a process: not on processors without them); its square root need not round correctly, numpy's does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from megascale_omni.kernels.interpreter import is_interpreted
from megascale_omni.optimizer.arithmetic import CHUNK, AdamSegment, StepScalars, check_tensors, chunks
from megascale_omni.optimizer.history import StepRecord


class _CudaAdam:
    """See [Note: one arithmetic on two processors].

    ``kernels`` steps with a Triton kernel on the device (or interpreted); without it the device uses torch's foreach
    functions themselves. In host memory it is the operations above either way.
    """

    name: str
    cut_multiple = 1
    decoupled: bool

    def __init__(self, *, kernels: bool) -> None:
        self.kernels = kernels

    def step(self, *, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor, record: StepRecord) -> None:
        """See :class:`AdamArithmetic`."""
        self.advance(p=p, m=m, v=v, g=g, records=(record,))

    def idle(self, *, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, record: StepRecord) -> None:
        """See :class:`AdamArithmetic`."""
        self.advance(p=p, m=m, v=v, g=None, records=(record,))

    def replay(self, *, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, records: Sequence[StepRecord]) -> None:
        """See :class:`AdamArithmetic`."""
        self.advance(p=p, m=m, v=v, g=None, records=records)

    def advance(
        self,
        *,
        p: torch.Tensor,
        m: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None,
        records: Sequence[StepRecord],
    ) -> None:
        """See :class:`AdamArithmetic`. One pass over memory."""
        tensors = {"p": p, "m": m, "v": v} if g is None else {"p": p, "m": m, "v": v, "g": g}
        check_tensors(**tensors)
        if not records or not p.numel():
            return
        if self.steps_together(p.device):
            from megascale_omni.kernels.paged_adam import launch_adam

            launch_adam([AdamSegment(p=p, m=m, v=v, g=g, records=records)], decoupled=self.decoupled)
        elif p.device.type == "cuda":
            self._on_device(p, m, v, g, records)
        else:
            _require_fused_multiply_add()
            for parts in chunks(*tensors.values(), numel=CHUNK):
                self._on_host(parts[0], parts[1], parts[2], None if g is None else parts[3], records)

    def steps_together(self, device: torch.device) -> bool:
        """See :class:`AdamArithmetic`."""
        return self.kernels and (device.type == "cuda" or is_interpreted())

    def advance_all(
        self,
        segments: Sequence[AdamSegment],
        *,
        clip: float | None,
        stop: torch.Tensor | None = None,
        due: torch.Tensor | None = None,
    ) -> None:
        """See :class:`AdamArithmetic`. One launch, one pass over memory."""
        from megascale_omni.kernels.paged_adam import launch_adam

        launch_adam(segments, decoupled=self.decoupled, clip=clip, stop=stop, due=due)

    def _on_host(
        self,
        p: torch.Tensor,
        m: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None,
        records: Sequence[StepRecord],
    ) -> None:
        zero, work = torch.zeros_like(p), torch.empty_like(p)
        for number, scalars in enumerate(map(StepScalars.of, records)):
            gradient = zero if g is None or number + 1 < len(records) else g
            if scalars.weight_decay != 0:
                if self.decoupled:
                    p.mul_(scalars.decay)
                else:
                    gradient = torch.add(gradient, p, alpha=scalars.weight_decay)
            m.lerp_(gradient, scalars.lerp)
            v.mul_(scalars.beta2).add_(torch.mul(gradient, gradient, out=work), alpha=scalars.square)
            np.sqrt(v.numpy(), out=work.numpy())
            work.div_(scalars.bias2_sqrt).add_(scalars.eps)
            p.add_(torch.div(m, work, out=work), alpha=scalars.size)

    def _on_device(
        self,
        p: torch.Tensor,
        m: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None,
        records: Sequence[StepRecord],
    ) -> None:
        zero = torch.zeros_like(p)
        for number, scalars in enumerate(map(StepScalars.of, records)):
            gradient = zero if g is None or number + 1 < len(records) else g
            if scalars.weight_decay != 0:
                if self.decoupled:
                    torch._foreach_mul_([p], scalars.decay)
                else:
                    (gradient,) = torch._foreach_add([gradient], [p], alpha=scalars.weight_decay)
            torch._foreach_lerp_([m], [gradient], scalars.lerp)
            torch._foreach_mul_([v], scalars.beta2)
            torch._foreach_addcmul_([v], [gradient], [gradient], scalars.square)
            root = torch._foreach_sqrt([v])
            torch._foreach_div_(root, [scalars.bias2_sqrt])
            torch._foreach_add_(root, scalars.eps)
            torch._foreach_addcdiv_([p], [m], root, [scalars.size])


class CudaAdamW(_CudaAdam):
    """Bits of ``torch.optim.AdamW(foreach=True)`` on CUDA."""

    name = "torch_cuda_adamw"
    decoupled = True


class CudaAdam(_CudaAdam):
    """Bits of ``torch.optim.Adam(foreach=True)`` on CUDA, weight decay as L2 penalty."""

    name = "torch_cuda_adam"
    decoupled = False


@cache
def fuses_multiply_add() -> bool:
    """Whether torch's ``lerp_`` and ``add_(alpha)`` on this processor are fused multiply-adds."""
    # (1 + 2^-12)^2 - (1 + 2^-11) is 2^-24 exactly, and 0 where the square was rounded first.
    x = torch.full((CHUNK // 64,), 1 + 2.0**-12)
    total = torch.full_like(x, -(1 + 2.0**-11))
    added = total.clone().add_(x, alpha=float(x[0]))
    # lerp: 0 + w (end - 0) fuses nothing that shows; from total to total + x with the same weight it does.
    weight = 0.25 + 2.0**-13
    start = torch.full_like(x, -(0.25 + 2.0**-12))
    mixed = start.clone().lerp_(start + (1 + 2.0**-11), weight)
    step = (start + (1 + 2.0**-11) - start).double()
    exact = (start.double() + step * float(torch.tensor(weight))).float()
    return bool((added == 2.0**-24).all()) and bool((mixed == exact).all())


def _require_fused_multiply_add() -> None:
    if not fuses_multiply_add():
        raise ValueError(
            "this processor has no fused multiply-add in torch's kernels, which stepping the pages of a CUDA run in "
            "host memory needs; step them on the device"
        )

"""The operations of one Adam step, exactly those of the dense optimizer that a run would have used without pages.

Symbols as in Adam's paper (arXiv 1412.6980) and AdamW's (1711.05101): p parameter, g gradient, m and v first and second
moment. All are flat fp32 tensors of one page or a part of it. Each class performs torch's operations in torch's order:

    p *= 1 - lr * weight_decay                     decoupled (AdamW), or    g += weight_decay * p    L2 (Adam)
    m += (1 - beta1) * (g - m)
    v  = beta2 * v + (1 - beta2) * g * g
    p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

[Note: cutting tensors]
Element i of a result depends on element i alone, but a kernel may round the last few elements of a tensor, which do
not fill a vector register, otherwise than the rest. torch's elementwise kernels do not (checked with AVX-512, AVX2 and
without vectors), so that the unfused arithmetic has the same bits on any cut. The fused kernels do: they contract the
update of v to a fused multiply-add in vectors and not behind them. There a view cut out of a larger tensor has that
tensor's bits if it begins at a multiple of ``cut_multiple`` elements and either ends at one or ends with the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megascale_omni.optimizer.history import StepRecord

# Four tensors and a scratch of a chunk stay in cache over the operations of a step. Replayed steps come back to a chunk
# again and again: it should be small. A single step does not, and gains where fewer operations are started.
CHUNK = 1 << 17
"""Elements handled at a time where steps are replayed."""
STEP_CHUNK = 1 << 18
"""The same for a single step: 10 to 15 % quicker on two threads."""


@dataclass(frozen=True)
class AdamSegment:
    """Elements that are stepped together (flat, contiguous), and the steps that they take.

    ``m`` and ``v`` None: zeros that stay zeros. ``g``: of the last record. ``weight``: where ``p`` goes, rounded.
    """

    p: torch.Tensor
    m: torch.Tensor | None
    v: torch.Tensor | None
    records: Sequence[StepRecord]
    g: torch.Tensor | None = None
    weight: torch.Tensor | None = None


class AdamArithmetic(Protocol):
    """One Adam step in place on flat fp32 views ``p``, ``m``, ``v`` and ``g`` of equal length.

    Attributes:
        name: as reported at the start of a run.
        cut_multiple: see [Note: cutting tensors]; 1 where any cut will do.
        decoupled: AdamW's weight decay. Adam's is a part of the gradient, so that moments do not stay zero without one.

    All methods raise ValueError for tensors that are not contiguous, not fp32 or of unequal lengths.
    """

    name: str
    cut_multiple: int
    decoupled: bool

    def step(self, *, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor, record: StepRecord) -> None:
        """Applies one step; ``g`` is left as it is."""
        ...

    def idle(self, *, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, record: StepRecord) -> None:
        """Applies one step whose gradient is zero: the bits of ``step(g=0)``, for less."""
        ...

    def replay(self, *, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, records: Sequence[StepRecord]) -> None:
        """Applies ``idle`` for each record in order."""
        ...

    def advance(
        self,
        *,
        p: torch.Tensor,
        m: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None,
        records: Sequence[StepRecord],
    ) -> None:
        """Applies ``records`` in order: the last one with gradient ``g``, the others (None: all) with zero."""
        ...

    def steps_together(self, device: torch.device) -> bool:
        """Whether :meth:`advance_all` takes all segments on ``device`` at once; others are advanced one by one."""
        ...

    def advance_all(
        self,
        segments: Sequence[AdamSegment],
        *,
        clip: float | None,
        stop: torch.Tensor | None = None,
        due: torch.Tensor | None = None,
    ) -> None:
        """The bits of :meth:`advance` for each segment, gradients (in fp32) multiplied by ``clip`` first.

        Nothing changes where ``stop`` (int32 ``[1]``, on the device) is not 0. With ``due`` (int64 ``[segments]``,
        likewise) a segment takes so many of its records, the last ones.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepScalars:
    """A step's scalars, computed in Python floats by the expressions of ``torch/optim/adam.py``."""

    weight_decay: float
    decay: float
    lerp: float
    beta2: float
    square: float
    bias2_sqrt: float
    eps: float
    size: float

    @classmethod
    def of(cls, record: StepRecord) -> StepScalars:
        bias1 = 1 - record.beta1**record.step
        bias2 = 1 - record.beta2**record.step
        return cls(
            weight_decay=record.weight_decay,
            decay=1 - record.lr * record.weight_decay,
            lerp=1 - record.beta1,
            beta2=record.beta2,
            square=1 - record.beta2,
            bias2_sqrt=bias2**0.5,
            eps=record.eps,
            size=-(record.lr / bias1),
        )


class _InSteps:
    """Missed steps first, then the one with a gradient: for arithmetics without a pass for both."""

    def idle(self: AdamArithmetic, *, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, record: StepRecord) -> None:
        """See :class:`AdamArithmetic`."""
        self.replay(p=p, m=m, v=v, records=(record,))

    def advance(
        self: AdamArithmetic,
        *,
        p: torch.Tensor,
        m: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None,
        records: Sequence[StepRecord],
    ) -> None:
        """See :class:`AdamArithmetic`."""
        missed = records if g is None else records[:-1]
        if missed:
            self.replay(p=p, m=m, v=v, records=missed)
        if g is not None and records:
            self.step(p=p, m=m, v=v, g=g, record=records[-1])

    def steps_together(self: AdamArithmetic, device: torch.device) -> bool:
        """See :class:`AdamArithmetic`: torch's operators take one tensor, or fill the cache with many."""
        return False

    def advance_all(
        self: AdamArithmetic,
        segments: Sequence[AdamSegment],
        *,
        clip: float | None,
        stop: torch.Tensor | None = None,
        due: torch.Tensor | None = None,
    ) -> None:
        """See :class:`AdamArithmetic`."""
        raise RuntimeError(f"{self.name} steps segments one by one")


class _UnfusedAdam(_InSteps):
    """torch's single-tensor Adam, which its ``foreach`` form equals bit for bit."""

    name: str
    cut_multiple = 1
    decoupled: bool

    def step(self, *, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor, record: StepRecord) -> None:
        """See :class:`AdamArithmetic`."""
        check_tensors(p=p, m=m, v=v, g=g)
        scalars = StepScalars.of(record)
        scratch = p.new_empty(min(p.numel(), STEP_CHUNK))
        for p_c, m_c, v_c, g_c in chunks(p, m, v, g, numel=STEP_CHUNK):
            work = scratch[: p_c.numel()]
            if scalars.weight_decay != 0:
                g_c = self._decay(p_c, g_c, scalars, work)
            m_c.lerp_(g_c, scalars.lerp)
            v_c.mul_(scalars.beta2).addcmul_(g_c, g_c, value=scalars.square)
            _update(p_c, m_c, v_c, scalars, work)

    def replay(self, *, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, records: Sequence[StepRecord]) -> None:
        """See :class:`AdamArithmetic`. Each chunk goes through all records before the next is read."""
        check_tensors(p=p, m=m, v=v)
        steps = [StepScalars.of(record) for record in records]
        scratch = p.new_empty(min(p.numel(), CHUNK))
        zero = p.new_zeros(())
        for p_c, m_c, v_c in chunks(p, m, v, numel=CHUNK):
            work = scratch[: p_c.numel()]
            for scalars in steps:
                g_c = zero
                if scalars.weight_decay != 0:
                    g_c = self._decay(p_c, g_c, scalars, work)
                m_c.lerp_(g_c, scalars.lerp)
                v_c.mul_(scalars.beta2)
                if g_c is not zero:  # adding the square of zero changes no v, a sum of squares being never -0
                    v_c.addcmul_(g_c, g_c, value=scalars.square)
                _update(p_c, m_c, v_c, scalars, work)

    def _decay(self, p: torch.Tensor, g: torch.Tensor, scalars: StepScalars, work: torch.Tensor) -> torch.Tensor:
        """Applies weight decay to ``p`` (decoupled), or returns the gradient that contains it, in ``work`` (L2)."""
        if self.decoupled:
            p.mul_(scalars.decay)
            return g
        return torch.add(g, p, alpha=scalars.weight_decay, out=work)


def _update(p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, scalars: StepScalars, work: torch.Tensor) -> None:
    torch.sqrt(v, out=work)
    work.div_(scalars.bias2_sqrt).add_(scalars.eps)
    p.addcdiv_(m, work, value=scalars.size)


class TorchAdamW(_UnfusedAdam):
    """Bits of ``torch.optim.AdamW(foreach=False)`` and ``foreach=True``."""

    name = "torch_adamw"
    decoupled = True


class TorchAdam(_UnfusedAdam):
    """Bits of ``torch.optim.Adam(foreach=False)`` and ``foreach=True``, weight decay as L2 penalty."""

    name = "torch_adam"
    decoupled = False


class _FusedAdam(_InSteps):
    """torch's fused kernels; see [Note: cutting tensors]."""

    name: str
    cut_multiple = 16  # fp32 elements of the widest vector register torch is built for
    decoupled: bool

    def step(self, *, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor, record: StepRecord) -> None:
        """See :class:`AdamArithmetic`."""
        check_tensors(p=p, m=m, v=v, g=g)
        self._kernel(p, m, v, g, record)

    def replay(self, *, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, records: Sequence[StepRecord]) -> None:
        """See :class:`AdamArithmetic`. Each chunk goes through all records before the next is read."""
        check_tensors(p=p, m=m, v=v)
        zeros = p.new_zeros(min(p.numel(), CHUNK))
        for p_c, m_c, v_c in chunks(p, m, v, numel=CHUNK):
            for record in records:
                self._kernel(p_c, m_c, v_c, zeros[: p_c.numel()], record)

    def _kernel(self, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor, record: StepRecord) -> None:
        kernel = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        kernel(
            [p],
            [g],
            [m],
            [v],
            [],
            [torch.tensor(float(record.step), dtype=torch.float32, device=p.device)],
            lr=record.lr,
            beta1=record.beta1,
            beta2=record.beta2,
            weight_decay=record.weight_decay,
            eps=record.eps,
            amsgrad=False,
            maximize=False,
        )


class TorchFusedAdamW(_FusedAdam):
    """Bits of ``torch.optim.AdamW(fused=True)``."""

    name = "torch_fused_adamw"
    decoupled = True


class TorchFusedAdam(_FusedAdam):
    """Bits of ``torch.optim.Adam(fused=True)``, weight decay as L2 penalty."""

    name = "torch_fused_adam"
    decoupled = False


_BY_DECOUPLED_AND_FUSED: dict[tuple[bool, bool], type[_UnfusedAdam] | type[_FusedAdam]] = {
    (True, False): TorchAdamW,
    (False, False): TorchAdam,
    (True, True): TorchFusedAdamW,
    (False, True): TorchFusedAdam,
}


def arithmetic_for(
    *,
    decoupled: bool,
    fused: bool,
    amsgrad: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    kernels: bool = False,
) -> AdamArithmetic:
    """The arithmetic that matches a dense torch optimizer.

    Args:
        decoupled: AdamW's weight decay, else Adam's L2 penalty.
        fused: whether the dense optimizer is ``fused=True``.
        amsgrad: of the dense optimizer; refused.
        dtype: of the parameters that the optimizer steps (the masters, where there are any).
        device: of the dense parameters; on CUDA torch's foreach kernels step them, unless they are fused.
        kernels: whether pages on the device are stepped by a Triton kernel in these bits.

    Raises:
        ValueError: a combination whose missed steps cannot be replayed exactly.
    """
    if amsgrad:
        raise ValueError("amsgrad is not supported with paged experts: use Adam or AdamW without amsgrad")
    if dtype is not torch.float32:
        raise ValueError(
            f"an optimizer that steps {dtype} parameters is not supported with paged experts: keep fp32 master weights "
            f"(with Megatron: train in fp32 or --bf16, not --fp16 or --use-precision-aware-optimizer)"
        )
    if device is not None and device.type == "cuda" and not fused:
        from megascale_omni.optimizer.cuda_arithmetic import CudaAdam, CudaAdamW

        return (CudaAdamW if decoupled else CudaAdam)(kernels=kernels)
    return _BY_DECOUPLED_AND_FUSED[decoupled, fused]()


def check_tensors(**tensors: torch.Tensor) -> None:
    """Refuses tensors that are not flat fp32 views of equal length. Raises ValueError with the tensor's name."""
    numel = tensors["p"].numel()
    for name, tensor in tensors.items():
        if tensor.dtype is not torch.float32 or not tensor.is_contiguous() or tensor.numel() != numel:
            raise ValueError(
                f"{name}: {tensor.dtype} of {tensor.numel()} elements, contiguous={tensor.is_contiguous()}; "
                f"an Adam step needs contiguous torch.float32 views of equal length (p has {numel})"
            )


def chunks(*tensors: torch.Tensor, numel: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of ``numel`` elements of each tensor, in order."""
    flats = [tensor.view(-1) for tensor in tensors]
    total = flats[0].numel()
    if total <= numel:
        yield tuple(flats)
        return
    for start in range(0, total, numel):
        yield tuple(flat[start : start + numel] for flat in flats)

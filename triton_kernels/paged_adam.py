"""Adam and AdamW over pages: missed steps of zero gradient and the step at hand, in one pass over memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple

import numpy as np
import torch
import triton
import triton.language as tl

from megascale_omni.kernels.checks import require
from megascale_omni.kernels.segments import (
    DTYPES,
    all_aligned,
    blocks_of,
    count_at,
    pointer_to,
    require_flat,
    same_device,
    upload,
)
from megascale_omni.optimizer.arithmetic import AdamSegment, StepScalars
from megascale_omni.optimizer.history import StepRecord

BLOCK = 1024
_SEGMENT_COLUMNS = 8
_SCALARS = 8
COLUMNS = tl.constexpr(_SEGMENT_COLUMNS)
SCALARS = tl.constexpr(_SCALARS)


@triton.jit(do_not_specialize_on_alignment=["segments", "blocks", "records"])
def paged_adam(
    segments,
    blocks,
    records,
    clip,
    stop,
    DECOUPLED: tl.constexpr,
    CLIP: tl.constexpr,
    STOP: tl.constexpr,
    GRADIENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some steps of Adam on every segment of a call, all but the last with a zero gradient.

    Formula: for each record  p *= 1 - lr wd  (decoupled; else g = fma(wd, p, g));
        m = fma(1 - b1, g - m, m)  (b1 <= 1/2: fma(m - g, b1, g));
        v = fma(1 - b2, g g, b2 v);  p = fma(-lr / (1 - b1^t), m / (sqrt(v) / sqrt(1 - b2^t) + eps), p).
    Shapes: p, m, v fp32 [n], g [n] of dtype GRADIENT (none: zero in the last step, too), weight [n] of dtype WEIGHT,
        records fp32 [steps, 8], stop int32 [1] (none: 0).
    Layout: a row of ``segments`` holds the addresses of p, m, v, g, weight (0 for none), n, first record, records.
        Where m and v are missing, moments are zeros and stay so. Where stop is not 0 nothing is changed. Division and
        root round correctly, nothing else is fused: the bits of torch's foreach kernels. A program is BLOCK elements.
    """
    if STOP:
        if tl.load(stop) != 0:
            return
    number = tl.program_id(0)
    row = segments + tl.load(blocks + 2 * number) * COLUMNS
    first, count = tl.load(row + 6), tl.load(row + 7).to(tl.int32)
    if count == 0:
        return
    start = count_at(blocks + 2 * number + 1, ALIGNED)
    at = tl.arange(0, BLOCK)
    mask = at < count_at(row + 5, ALIGNED) - start
    moments = tl.load(row + 1) != 0
    p_at = pointer_to(tl.load(row), tl.float32, ALIGNED) + start + at
    m_at = pointer_to(tl.load(row + 1), tl.float32, ALIGNED) + start + at
    v_at = pointer_to(tl.load(row + 2), tl.float32, ALIGNED) + start + at
    p = tl.load(p_at, mask=mask, other=0.0)
    m = tl.load(m_at, mask=mask & moments, other=0.0)
    v = tl.load(v_at, mask=mask & moments, other=0.0)
    gradient = tl.zeros((BLOCK,), dtype=tl.float32)
    if GRADIENT is not None:
        given = tl.load(row + 3)
        g_at = pointer_to(given, GRADIENT, ALIGNED) + start + at
        gradient = tl.load(g_at, mask=mask & (given != 0), other=0.0).to(tl.float32)
        if CLIP:
            gradient = gradient * clip
    for step in range(count):
        scalars = records + (first + step) * SCALARS
        weight_decay = tl.load(scalars)
        g = tl.where(step == count - 1, gradient, 0.0)
        if DECOUPLED:
            # Where there is no decay torch leaves p alone; times 1 it keeps its bits, too.
            p = p * tl.load(scalars + 1)
        else:
            g = tl.where(weight_decay != 0.0, tl.fma(tl.zeros_like(p) + weight_decay, p, g), g)
        lerp, square = tl.load(scalars + 2), tl.load(scalars + 4)
        nearer = tl.zeros_like(m) + lerp
        m = tl.where(lerp < 0.5, tl.fma(nearer, g - m, m), tl.fma(m - g, 1.0 - nearer, g))
        v = tl.fma(tl.zeros_like(v) + square, g * g, v * tl.load(scalars + 3))
        root = tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(v) + tl.load(scalars + 5)) + tl.load(scalars + 6)
        p = tl.fma(tl.zeros_like(p) + tl.load(scalars + 7), tl.div_rn(m, root), p)
    tl.store(p_at, p, mask=mask)
    tl.store(m_at, m, mask=mask & moments)
    tl.store(v_at, v, mask=mask & moments)
    if WEIGHT is not None:
        weight = tl.load(row + 4)
        tl.store(pointer_to(weight, WEIGHT, ALIGNED) + start + at, p.to(WEIGHT), mask=mask & (weight != 0))


def launch_adam(
    segments: Sequence[AdamSegment],
    *,
    decoupled: bool,
    clip: float | None = None,
    stop: torch.Tensor | None = None,
    due: torch.Tensor | None = None,
) -> None:
    """Steps segments in one launch; see :func:`paged_adam`. Gradients are multiplied by ``clip`` where it is given.

    Nothing changes where the device finds ``stop`` (int32 ``[1]``) not to be 0. ``due`` int64 ``[segments]``: how many
    of its records a segment takes, the last ones, as the device finds.

    Raises:
        ValueError: a tensor that does not fit, a gradient without moments, a moment without the other one.
    """
    if due is not None:
        require("due", due, dtype=torch.int64, device=due.device, shape=(len(segments),))
    elif not all(s.p.numel() and s.records for s in segments):
        segments = [s for s in segments if s.p.numel() and s.records]
    if not segments:
        return
    for segment in segments:
        _check(segment)
    if clip is not None and not isinstance(clip, float | int):
        raise ValueError(f"clip: {type(clip).__name__}, must be a number")
    device = same_device("p", [s.p for s in segments])
    for segment in segments:
        for name, tensor in (("m", segment.m), ("v", segment.v), ("g", segment.g), ("weight", segment.weight)):
            if tensor is not None and tensor.device != device:
                raise ValueError(f"{name}: on {tensor.device}, must be on {device} like p")
    if stop is not None:
        require("stop", stop, dtype=torch.int32, device=device, shape=(1,))
    table = np.zeros((len(segments), _SEGMENT_COLUMNS), dtype=np.int64)
    records = _Records(sorted((s.records for s in segments), key=len, reverse=True))
    for number, s in enumerate(segments):
        addresses = [0 if t is None else t.data_ptr() for t in (s.p, s.m, s.v, s.g, s.weight)]
        table[number] = (*addresses, s.p.numel(), records.place(s.records), len(s.records))
    blocks = blocks_of(table[:, 5], BLOCK)
    there = upload(device, table, blocks, records.table())
    if due is not None:
        require("due", due, dtype=torch.int64, device=device)
        there[0][:, 6] += there[0][:, 7] - due
        there[0][:, 7] = due
    paged_adam[(len(blocks),)](
        *there,
        1.0 if clip is None else clip,
        stop,
        DECOUPLED=decoupled,
        CLIP=clip is not None,
        STOP=stop is not None,
        GRADIENT=_one_dtype("g", [s.g for s in segments]),
        WEIGHT=_one_dtype("weight", [s.weight for s in segments]),
        ALIGNED=all_aligned(table[:, :6]),
        BLOCK=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,  # a multiplication that is followed by an addition rounds twice, as torch's do
    )


class _Records:
    """The steps of all segments; those that many have in common are there once.

    Pages that are behind have missed the last steps of one history, more of them or fewer: they share its end.
    """

    def __init__(self, longest_first: Iterable[Sequence[StepRecord]]) -> None:
        self._scalars: list[tuple[float, ...]] = []
        self._known: dict[int, tuple[tuple[int, ...], int]] = {}  # by last record: the records and where they begin
        for records in longest_first:
            self.place(records)

    def place(self, records: Sequence[StepRecord]) -> int:
        """Where ``records`` begin in the table."""
        if not records:
            return 0
        wanted = tuple(map(id, records))
        known, first = self._known.get(wanted[-1], ((), 0))
        if known[-len(wanted) :] != wanted:
            known, first = self._known[wanted[-1]] = wanted, len(self._scalars)
            self._scalars += [astuple(StepScalars.of(record)) for record in records]
        return first + len(known) - len(wanted)

    def table(self) -> np.ndarray:
        """fp32 ``[steps, 8]``."""
        return np.asarray(self._scalars, dtype=np.float64).astype(np.float32)


def _check(segment: AdamSegment) -> None:
    numel = segment.p.numel()
    require_flat("p", segment.p, dtypes=(torch.float32,))
    if (segment.m is None) != (segment.v is None):
        raise ValueError("m and v: one is missing; give both, or none where they are zeros")
    if segment.m is None and segment.g is not None:
        raise ValueError("g: a gradient needs m and v to go to")
    for name, tensor in (("m", segment.m), ("v", segment.v)):
        if tensor is not None:
            require_flat(name, tensor, dtypes=(torch.float32,), numel=numel)
    for name, tensor in (("g", segment.g), ("weight", segment.weight)):
        if tensor is not None:
            require_flat(name, tensor, dtypes=tuple(DTYPES), numel=numel)


def _one_dtype(name: str, tensors: Sequence[torch.Tensor | None]) -> tl.dtype | None:
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    if len(dtypes) > 1:
        raise ValueError(f"{name}: dtypes {', '.join(sorted(map(str, dtypes)))} in one call, must be one")
    return DTYPES[dtypes.pop()] if dtypes else None

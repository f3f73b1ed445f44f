"""Sums over a gradient's elements, from which its norm and spread follow; they add up over shards and ranks.

[Note: gradient sums]
A row of sums is (elements, sum g, sum |g|, sum g^2, non-finite elements) in fp64, and beside it the largest |g|. Within
a run of at most ``RUN`` elements sums are made in fp32 by vectorised kernels, while the run is in the processor's
cache; runs are added in fp64. A run whose fp32 sums overflow or underflow is summed again in fp64; what is then not
finite has elements that are not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

COLUMNS = 5
COUNT, TOTAL, ABSOLUTE, SQUARES, NON_FINITE = range(COLUMNS)
RUN = 1 << 18
"""Elements that are summed at once: 1 MiB in fp32."""


@dataclass(frozen=True)
class GradientStatistics:
    """Of one module's gradient: elements, sum g, sum |g|, sum g^2, non-finite elements, largest |g|."""

    count: float = 0.0
    total: float = 0.0
    absolute: float = 0.0
    squares: float = 0.0
    non_finite: float = 0.0
    largest: float = 0.0

    @property
    def norm(self) -> float:
        """The l2 norm; NaN or infinite where elements are not finite."""
        return math.sqrt(self.squares) if self.squares >= 0 else math.nan

    @property
    def std(self) -> float:
        """The standard deviation of the elements, sqrt(E[g^2] - E[g]^2)."""
        if not self.count:
            return 0.0
        variance = self.squares / self.count - (self.total / self.count) ** 2
        # Rounding makes a constant gradient's variance tiny or negative; NaN stays NaN.
        return math.sqrt(variance) if variance > 0 else 0.0 * variance

    def gvc(self, eps: float = 1e-30) -> float:
        """The coefficient of variation ``std(g) / (mean(|g|) + eps)``; 0 for a gradient of zeros."""
        if not self.count or self.absolute == 0:
            return 0.0
        return self.std / (self.absolute / self.count + eps)

    def scaled(self, factor: float) -> GradientStatistics:
        """Of the gradient multiplied by ``factor``."""
        size = abs(factor)
        return GradientStatistics(
            count=self.count,
            total=self.total * factor,
            absolute=self.absolute * size,
            squares=self.squares * factor**2,
            non_finite=self.non_finite,
            largest=self.largest * size,
        )


def statistics_of(tensors: Iterable[torch.Tensor]) -> GradientStatistics:
    """Of all elements of some tensors (any dtypes, shapes and devices) together."""
    sums = GradientSums(1)
    for tensor in tensors:
        sums.add(0, tensor)
    sums.flush()
    return sums.statistics()[0]


class GradientSums:
    """Rows of sums that tensors are added to.

    Small tensors of a row are summed together. Everything is in ``sums`` [rows, COLUMNS] and ``largest`` [rows], fp64
    on the CPU, after :meth:`flush`.
    """

    def __init__(self, rows: int) -> None:
        self.sums = torch.zeros(rows, COLUMNS, dtype=torch.float64)
        self.largest = torch.zeros(rows, dtype=torch.float64)
        self._small: dict[tuple[int, float, torch.device], list[torch.Tensor]] = {}
        self._waiting: Counter[tuple[int, float, torch.device]] = Counter()
        self._done: list[tuple[int, float, torch.Tensor, torch.Tensor]] = []
        self._scratch: dict[torch.device, torch.Tensor] = {}

    def add(self, row: int, tensor: torch.Tensor, share: float = 1.0) -> None:
        """Adds ``share`` times the sums of a tensor's elements (its maximum as it is)."""
        flat = tensor.detach().reshape(-1)
        if not flat.numel():
            return
        if flat.numel() <= RUN // 16:
            self._add_small(row, flat, share)
            return
        for run in flat.split(RUN):
            self._add_run(row, run if run.dtype is torch.float32 else run.float(), share)

    def add_statistics(self, row: int, known: GradientStatistics, share: float = 1.0) -> None:
        """Adds ``share`` times sums that were made elsewhere."""
        sums = (known.count, known.total, known.absolute, known.squares, known.non_finite)
        self.sums[row] += torch.tensor(sums, dtype=torch.float64) * share
        self.largest[row] = max(float(self.largest[row]), known.largest)

    def flush(self) -> None:
        """Brings everything into ``sums`` and ``largest``. Waits for the device once."""
        for key in list(self._small):
            self._add_waiting(key)
        by_device: dict[torch.device, list[tuple[int, float, torch.Tensor, torch.Tensor]]] = {}
        for entry in self._done:
            by_device.setdefault(entry[3].device, []).append(entry)
        for entries in by_device.values():
            values = torch.stack([entry[3] for entry in entries]).cpu().double()
            for (row, share, run, _), (total, absolute, norm, largest) in zip(entries, values, strict=True):
                self._collect(row, share, run, (float(total), float(absolute), float(norm), float(largest)))
        self._done.clear()

    def statistics(self) -> list[GradientStatistics]:
        """A row each."""
        rows = zip(self.sums.tolist(), self.largest.tolist(), strict=True)
        return [
            GradientStatistics(count, total, absolute, squares, non_finite, largest)
            for (count, total, absolute, squares, non_finite), largest in rows
        ]

    def _add_small(self, row: int, flat: torch.Tensor, share: float) -> None:
        key = (row, share, flat.device)
        self._small.setdefault(key, []).append(flat if flat.dtype is torch.float32 else flat.float())
        self._waiting[key] += flat.numel()
        if self._waiting[key] >= RUN:
            self._add_waiting(key)

    def _add_waiting(self, key: tuple[int, float, torch.device]) -> None:
        self._add_run(key[0], torch.cat(self._small.pop(key)), key[1])
        self._waiting[key] = 0

    def _add_run(self, row: int, run: torch.Tensor, share: float) -> None:
        """``run``: fp32, flat, at most about ``RUN`` elements."""
        values = four_sums(run, self._scratch)
        if run.device.type == "cpu":
            self._collect(row, share, run, tuple(float(v) for v in values))  # type: ignore[arg-type]
        else:
            self._done.append((row, share, run, torch.stack(values)))

    def _collect(self, row: int, share: float, run: torch.Tensor, values: tuple[float, float, float, float]) -> None:
        found = exact_where_needed(run, values)
        self.add_statistics(row, found, share)


def four_sums(run: torch.Tensor, scratch: dict[torch.device, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Scalars (sum g, sum |g|, norm, largest |g|) of a flat fp32 tensor, in fp32.

    ``scratch`` keeps the memory for |g| between calls.
    """
    memory = scratch.get(run.device)
    if memory is None or memory.numel() < run.numel():
        memory = scratch[run.device] = torch.empty(max(run.numel(), RUN), device=run.device)
    size = torch.abs(run, out=memory[: run.numel()])
    return run.sum(), size.sum(), torch.linalg.vector_norm(run), size.amax()


def exact_where_needed(run: torch.Tensor, values: tuple[float, float, float, float]) -> GradientStatistics:
    """The sums of ``run`` from its four fp32 ones, or from fp64 where these overflow or underflow."""
    total, absolute, norm, largest = values
    count = float(run.numel())
    squares = norm**2
    if math.isfinite(absolute) and math.isfinite(squares) and (norm > 1e-15 * math.sqrt(count) or absolute == 0):
        return GradientStatistics(count, total, absolute, squares, 0.0, largest)
    exact = run.double()
    bad = float((~torch.isfinite(exact)).sum())
    return GradientStatistics(
        count=count,
        total=float(exact.sum()),
        absolute=float(exact.abs().sum()),
        squares=float(exact.square().sum()),
        non_finite=bad,
        largest=math.inf if bad else float(exact.abs().amax()),
    )

"""Sums over a gradient's elements, from which its norm and spread follow; they add up over shards and ranks.

[Note: gradient sums]
A row of sums is (elements, sum g, sum |g|, sum g^2, non-finite elements) in fp64, and beside it the largest |g|. Within
a run of at most ``RUN`` elements sums are made in fp32 by vectorised kernels, while the run is in the processor's
cache; runs are added in fp64. A run whose fp32 sums overflow or underflow is summed again in fp64; what is then not
finite has elements that are not.

torch's ``sum`` is pairwise. Its ``vector_norm`` adds up in order, 8 or 16 at once, and errs by 1e-6 and more of many
elements; of rows of ``ROW`` it is exact to 1e-7, and needs one pass where squaring and adding need two.

On the CPU a run is summed by one thread. It lies in one core's cache, and to wake another thread for each operation
costs more than that one saves: 220 microseconds a page of 768 KiB with two threads, 80 with one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

COLUMNS = 5
COUNT, TOTAL, ABSOLUTE, SQUARES, NON_FINITE = range(COLUMNS)
RUN = 1 << 18
"""Elements that are summed at once: 1 MiB in fp32."""

ROW = 256
"""Elements whose squares are summed in order."""

GVC_EPS = 1e-60
"""Far below any mean of fp32 numbers: it keeps a division defined and changes no digit."""

FourSums = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_Unread = tuple[int, float, torch.Tensor, FourSums]

Scratch = dict[torch.device, torch.Tensor]
"""Memory for intermediate results, kept between calls."""


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

    def gvc(self) -> float:
        """The coefficient of variation ``std(g) / (mean(|g|) + eps)``; 0 for a gradient of zeros."""
        if not self.count or self.absolute == 0:
            return 0.0
        return self.std / (self.absolute / self.count + GVC_EPS)

    def plus(self, other: GradientStatistics, share: float = 1.0) -> GradientStatistics:
        """With ``share`` times the sums of other elements."""
        return GradientStatistics(
            count=self.count + other.count * share,
            total=self.total + other.total * share,
            absolute=self.absolute + other.absolute * share,
            squares=self.squares + other.squares * share,
            non_finite=self.non_finite + other.non_finite * share,
            largest=max(self.largest, other.largest),
        )

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


def statistics_of(tensors: Iterable[torch.Tensor], scratch: Scratch | None = None) -> GradientStatistics:
    """Of all elements of some tensors (any dtypes, shapes and devices) together; ``scratch`` is memory to use again."""
    scratch = {} if scratch is None else scratch
    found: GradientStatistics | None = None
    with one_thread():
        for tensor in tensors:
            for run in tensor.detach().reshape(-1).split(RUN):
                if run.numel():
                    run = run if run.dtype is torch.float32 else run.float()
                    here = exact_where_needed(run, _numbers(four_sums(run, scratch)))
                    found = here if found is None else found.plus(here)
    return found or GradientStatistics()


@contextmanager
def one_thread() -> Iterator[None]:
    """Operations on the CPU that this thread makes meanwhile are made by it alone."""
    threads = torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)


class GradientSums:
    """Rows of sums that tensors are added to. Small tensors of a row are summed together."""

    def __init__(self, rows: int) -> None:
        self._rows = [GradientStatistics()] * rows
        self._small: dict[tuple[int, float, torch.device], list[torch.Tensor]] = {}
        self._waiting: Counter[tuple[int, float, torch.device]] = Counter()
        self._unread: list[_Unread] = []
        self._scratch: Scratch = {}

    def add(self, row: int, tensor: torch.Tensor, share: float = 1.0) -> None:
        """Adds ``share`` times the sums of a tensor's elements (its maximum as it is)."""
        flat = tensor.detach().reshape(-1)
        if flat.numel() > RUN // 16:
            for run in flat.split(RUN):
                self._add_run(row, run if run.dtype is torch.float32 else run.float(), share)
        elif flat.numel():
            key = (row, share, flat.device)
            self._small.setdefault(key, []).append(flat if flat.dtype is torch.float32 else flat.float())
            self._waiting[key] += flat.numel()
            if self._waiting[key] >= RUN:
                self._add_waiting(key)

    def add_statistics(self, row: int, known: GradientStatistics, share: float = 1.0) -> None:
        """Adds ``share`` times sums that were made elsewhere."""
        self._rows[row] = self._rows[row].plus(known, share)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, COLUMNS] sums and [rows] maxima, fp64, on the CPU. Waits once for each device."""
        for key in list(self._small):
            self._add_waiting(key)
        by_device: dict[torch.device, list[_Unread]] = {}
        for entry in self._unread:
            by_device.setdefault(entry[2].device, []).append(entry)
        for entries in by_device.values():
            values = torch.stack([torch.stack(entry[3]) for entry in entries]).tolist()
            for (row, share, run, _), four in zip(entries, values, strict=True):
                self.add_statistics(row, exact_where_needed(run, four), share)
        self._unread.clear()
        sums = [[r.count, r.total, r.absolute, r.squares, r.non_finite] for r in self._rows]
        largest = [r.largest for r in self._rows]
        return torch.tensor(sums, dtype=torch.float64), torch.tensor(largest, dtype=torch.float64)

    def _add_waiting(self, key: tuple[int, float, torch.device]) -> None:
        self._add_run(key[0], torch.cat(self._small.pop(key)), key[1])
        self._waiting[key] = 0

    def _add_run(self, row: int, run: torch.Tensor, share: float) -> None:
        """``run``: fp32, flat, at most about ``RUN`` elements."""
        values = four_sums(run, self._scratch)
        if run.device.type == "cpu":
            self.add_statistics(row, exact_where_needed(run, _numbers(values)), share)
        else:
            self._unread.append((row, share, run, values))


def from_rows(sums: torch.Tensor, largest: torch.Tensor) -> list[GradientStatistics]:
    """What :meth:`GradientSums.read` gave, summed over ranks or not, row by row."""
    return [
        GradientStatistics(count, total, absolute, squares, non_finite, top)
        for (count, total, absolute, squares, non_finite), top in zip(sums.tolist(), largest.tolist(), strict=True)
    ]


def four_sums(run: torch.Tensor, scratch: Scratch) -> FourSums:
    """(sum g, sum |g|, sum g^2, largest |g|) of a flat fp32 tensor, in fp32.

    ``scratch`` keeps the memory for |g| between calls.
    """
    memory = scratch.get(run.device)
    if memory is None or memory.numel() < run.numel():
        memory = scratch[run.device] = torch.empty(max(run.numel(), RUN), device=run.device)
    squares = _sum_of_squares(run)
    size = torch.abs(run, out=memory[: run.numel()])
    return run.sum(), size.sum(), squares, size.amax()


def _sum_of_squares(run: torch.Tensor) -> torch.Tensor:
    whole = run.numel() // ROW * ROW
    rest = run[whole:]
    if not whole:
        return rest.square().sum()
    rows = torch.linalg.vector_norm(run[:whole].view(-1, ROW), dim=1).square_().sum()
    return rows if whole == run.numel() else rows + rest.square().sum()


def _numbers(values: FourSums) -> tuple[float, ...]:
    """Of sums that are waited for at once."""
    return tuple(value.item() for value in values)


def exact_where_needed(run: torch.Tensor, values: Sequence[float]) -> GradientStatistics:
    """The sums of ``run`` from its four fp32 ones, or from fp64 where these overflow or underflow."""
    total, absolute, squares, largest = values
    count = float(run.numel())
    if math.isfinite(absolute) and math.isfinite(squares) and (squares > 1e-30 * count or absolute == 0):
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

"""What every optimizer's dense gradients have in common: pieces of parameters, and how they are multiplied to a limit.

Multiplying is done where the optimizer does it, in its own formula and dtype, so that one module is clipped to the bit
as stock clips.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megascale_omni.bulk import Bulk, Factor, bulk_for
from megascale_omni.clipping import GradientPart


@dataclass(frozen=True)
class Limit:
    """A norm, and what it is to be clipped to."""

    norm: float
    threshold: float


class Verdict(Protocol):
    """Who decides about a step."""

    norm: float
    """Of the whole gradient, as it was last decided about; not finite where the step is left out."""

    def decide(self) -> bool:
        """Whether the step at hand is left out. A collective, once a step."""
        ...

    def limit(self, parameter: str) -> Limit | None:
        """What the last decision says of a parameter's gradient; None where it stays as it is."""
        ...


@dataclass(frozen=True)
class Piece:
    """A run of elements of a flat gradient that belong to one parameter."""

    name: str
    start: int
    length: int


class DenseGradients(ABC):
    """One optimizer's gradients. ``names``: of the model's parameters, by id.

    ``bulk`` multiplies them (None: chosen by device).
    """

    bulk: Bulk | None = None

    def __init__(self, optimizer: Any, names: Mapping[int, str]) -> None:  # noqa: ANN401 - DeepSpeed's have no base
        self._optimizer = optimizer
        self._names = dict(names)

    @abstractmethod
    def parts(self) -> Iterator[GradientPart]:
        """What this rank holds, once all gradients of a step are reduced."""

    @abstractmethod
    def norm_with(self, experts: float) -> float:
        """Stock's norm, joined by that of the experts, in the optimizer's own arithmetic. A collective."""

    @abstractmethod
    def factor(self, limit: Limit) -> Factor:
        """What the optimizer multiplies by to clip; 1 or less."""

    @abstractmethod
    def install(self, verdict: Verdict) -> None:
        """From now on the optimizer asks ``verdict``."""

    def apply(self, verdict: Verdict, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._multiply((gradient, verdict.limit(name)) for name, gradient in named)

    def _multiply(self, limited: Iterable[tuple[torch.Tensor, Limit | None]]) -> None:
        """All at once, and without a pass over gradients that stay as they are."""
        groups: dict[Limit, list[torch.Tensor]] = {}
        for gradient, limit in limited:
            if limit is not None:
                groups.setdefault(limit, []).append(gradient)
        factors = {limit: self.factor(limit) for limit in groups}
        small = [limit for limit, factor in factors.items() if float(factor) < 1.0]
        if small:
            bulk = self.bulk or bulk_for(groups[small[0]][0].device)
            bulk.scale([groups[limit] for limit in small], [factors[limit] for limit in small])

    def apply_to(self, verdict: Verdict, flat: torch.Tensor, pieces: list[Piece]) -> None:
        """One product for each run of pieces with the same limit."""
        runs: list[tuple[torch.Tensor, Limit | None]] = []
        start = stop = 0
        current: Limit | None = None
        for piece in [*pieces, Piece("", flat.numel(), 0)]:
            limit = verdict.limit(piece.name) if piece.name else None
            if piece.start != stop or limit != current:
                runs.append((flat.narrow(0, start, stop - start), current))
                start, current = piece.start, limit
            stop = piece.start + piece.length
        self._multiply(runs)

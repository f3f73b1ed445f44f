"""What is measured of one gradient page, and what of it is still on the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megascale_omni.clipping.statistics import GradientStatistics
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.shards import PageName


@dataclass(frozen=True)
class PageStatistics:
    """Of one gradient page after scaling and reduction, where it was asked for.

    ``norms``: its fp32 norm, or those of the tensors it holds. ``nonzeros``: its non-zero elements. ``sums``: for
    clipping by module.
    """

    norms: tuple[float, ...] | None
    nonzeros: int | None
    sums: GradientStatistics | None

    @property
    def squares(self) -> float | None:
        """The squared norm of the page, in fp64."""
        return None if self.norms is None else sum(norm**2 for norm in self.norms)


@dataclass(frozen=True)
class ComingStatistics:
    """What was measured of a page and is still on the device.

    ``check``: the norm that says whether all is finite, where sums do not. ``norms``: None where they were not taken.
    ``seven``: see ``Backend.statistics``. ``zeros``, ``sums``: whether these were asked for. ``kept``: whether the page
    stays, so that its statistics are wanted.
    """

    experts: PagedExperts
    name: PageName
    check: torch.Tensor | None
    norms: tuple[torch.Tensor, ...] | None
    seven: torch.Tensor
    zeros: bool
    sums: bool
    kept: bool = True

    def tensors(self) -> list[torch.Tensor]:
        """All numbers, in the order in which :meth:`read` takes them."""
        check = () if self.check is None else (self.check.view(1),)
        return [self.seven, *check, *(norm.view(1) for norm in self.norms or ())]

    def read(self, numbers: Iterator[float]) -> tuple[PageStatistics, str | None]:
        """The statistics, and what is wrong with the gradient."""
        finite, total, absolute, squares, largest, bad, nonzeros = (next(numbers) for _ in range(7))
        overflows = self.check is not None and not math.isfinite(next(numbers))
        norms = None if self.norms is None else tuple(next(numbers) for _ in self.norms)
        sums = GradientStatistics(finite, total, absolute, squares, 0.0, largest)
        if bad:
            sums = GradientStatistics(finite + bad, math.nan, math.nan, math.nan, bad, math.inf)
        wrong = fault_of(self.experts, self.name, int(bad)) if overflows or (self.sums and bad) else None
        return PageStatistics(norms, int(nonzeros) if self.zeros else None, sums if self.sums else None), wrong


def fault_of(experts: PagedExperts, name: PageName, bad: int) -> str:
    """What a gradient page with ``bad`` non-finite elements, or none but too large a norm, is called in an error."""
    what = f"{bad} non-finite elements" if bad else "a norm that overflows fp32"
    return f"{experts.path}, local expert {name[0]} (slice {name[1]}): {what}"


def stock_tensors(experts: PagedExperts, page: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors of an expert that is one page, in stock's order and, but for leading dimensions, its layout."""
    views = experts.layout.views(page, 0)
    yield views.fc1_Rh
    if views.fc1_bias_R is not None:
        yield views.fc1_bias_R
    # Pages have a row for each neuron, stock a column: a sum in stock's order needs them laid out so.
    down_hr = experts.context.workspace.take("down_gradient", tuple(views.down_rh.shape[::-1]), page.dtype)
    yield down_hr.copy_(views.down_rh.t())
    if views.down_bias_h is not None:
        yield views.down_bias_h

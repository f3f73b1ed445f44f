"""What is done to gradient pages by the backward that completes them.

[Note: last gradients]
A gradient page is complete when the last micro-batch's backward has added to it. What has to be done to it then (check,
scale, measure) is done while it is still in the device arena; a sweep over all gradients later would bring each one
back. Where no norm of all gradients is needed before the step, the page is stepped at once as well, and its gradient
never leaves: of an expert that got tokens weights, moments and gradient are in the arena together, once.

A page whose gradient is not finite is not stepped: the run ends, or the step, on every rank. Where kernels measure
gradients the host would wait for each to learn that. So where such a gradient ends the run in any case, kernels that
step a page read on the device whether there is one (*stop*), and leave all as it is from then on; the host learns of it
after the backward, from all numbers at once. Elsewhere it reads the numbers of a wave together.

Both need to know which backward is the last one. An adapter tells how many a module has in a step; where it cannot
tell, pages wait. One more backward than was told would add to a gradient that has been used already: that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from megascale_omni.paging.leases import Wave
from megascale_omni.paging.planes import Plane
from megascale_omni.paging.work import PageWork

if TYPE_CHECKING:
    from megascale_omni.experts.gradients import ExpertGradients
    from megascale_omni.experts.module import PagedExperts
    from megascale_omni.experts.shards import PageName

OFF = "--megascale-step-in-backward off (paging.step_in_backward)"
"""The remedy where a loop is not what it was taken for."""


class Finisher(Protocol):
    """Completes the gradient pages of one backward, wave by wave."""

    planes: tuple[Plane, ...]
    """Other planes of these pages that it works on: to be brought while the wave is computed."""

    def wave(self, wave: Wave) -> None:
        """The gradients of a wave's pages have been added."""
        ...


@dataclass
class Completion:
    """Who completes a module's gradients in the backward: ``begin(active experts)`` gives the one for this call.

    ``in_backward``: whether it ever gives one. ``uses`` counts the optimizer's steps by the gradients at hand.
    ``gone``: some were not kept after theirs.
    """

    begin: Callable[[Sequence[int]], Finisher | None] = lambda active: None
    in_backward: bool = False
    uses: int = 0
    gone: bool = False

    def check(self) -> None:
        """Raises RuntimeError where gradients that are wanted, or are to be added to, have been used and are gone."""
        if self.gone:
            raise RuntimeError(
                "gradients of experts have been used by an optimizer step and are gone, which they are where pages "
                "leave the device or are stepped in the backward. Drop them all (zero_grad_buffer) after each step; to "
                f"use them twice, keep all pages resident and set {OFF}"
            )

    def used(self, *, gone: bool) -> None:
        """The optimizer has stepped by the gradients at hand."""
        self.uses += 1
        self.gone = self.gone or gone

    def renew(self) -> None:
        """Gradients are dropped: the next ones have not been used."""
        self.uses, self.gone = 0, False


class PageStepper(Protocol):
    """The optimizer, as far as it can step one page."""

    def planes_at_once(self, experts: PagedExperts) -> tuple[Plane, ...] | None:
        """Planes beside weight and gradient that a step works on; None where it does not step these experts."""
        ...

    def reads_stop(self, experts: PagedExperts) -> bool:
        """Whether :meth:`step_at_once` takes a ``stop`` for pages in the device arena."""
        ...

    def step_at_once(
        self,
        experts: PagedExperts,
        name: PageName,
        pages: dict[Plane, torch.Tensor],
        *,
        stop: torch.Tensor | None = None,
    ) -> bool:
        """Applies the coming step to a page; ``pages`` holds weight and gradient, and the planes named above.

        Where ``stop`` (int32 ``[1]`` on the device) is not 0 the page stays as it is. False where the host saw that.
        """
        ...

    @property
    def deciding(self) -> tuple[Plane, ...]:
        """Planes that say, where their pages lie in host memory, that a page is stepped there."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether pages have been stepped at once and the step itself has not come yet."""
        ...


class LastGradients:
    """Completes the gradient pages of a model chunk in the last backward of a step (see [Note: last gradients]).

    Args:
        gradients: the chunk's. scale: what they are multiplied by after the last backward. backwards: how many a module
        has in this step, None where nobody knows. ends_run: whether a gradient that is not finite ends the run before
        the optimizer's step.
    """

    def __init__(
        self,
        gradients: ExpertGradients,
        *,
        scale: float,
        backwards: Callable[[], int | None],
        ends_run: bool = False,
    ) -> None:
        self.gradients = gradients
        self.scale = scale
        self.ends_run = ends_run
        self.stepper: PageStepper | None = None
        self._backwards = backwards
        self._seen: dict[PagedExperts, int] = {}
        gradients.last = self
        for experts in gradients.modules:
            experts.context.completion.begin = partial(self._begin, experts)
            experts.context.completion.in_backward = True

    def reset(self) -> None:
        """A new step begins. RuntimeError where pages were stepped and the optimizer's step never came."""
        self._seen.clear()
        if self.stepper is not None and self.stepper.is_open:
            raise RuntimeError(
                "gradients are dropped after experts were stepped by them, and before the optimizer's step: a loop "
                f"that computes gradients without using them needs {OFF}"
            )

    def _begin(self, experts: PagedExperts, active: Sequence[int]) -> Finisher | None:
        self._seen[experts] = self._seen.get(experts, 0) + 1
        again = [e for e in active if (experts, (e, 0)) in self.gradients.done]
        if again:
            raise RuntimeError(
                f"{experts.path}, local expert {again[0]}: backward {self._seen[experts]} of a step that was announced "
                f"with {self._backwards()}; its gradient is complete and may have been used; drop gradients before "
                f"every step (zero_grad_buffer() of the model), or {OFF}"
            )
        return _Finisher(self, experts) if self._seen[experts] == self._backwards() else None


class _Finisher:
    """One module's last backward of a step."""

    def __init__(self, last: LastGradients, experts: PagedExperts) -> None:
        self._experts, self._gradients, self._scale = experts, last.gradients, last.scale
        planes = None if last.stepper is None else last.stepper.planes_at_once(experts)
        self._stepper = None if planes is None else last.stepper
        self.planes = planes or ()
        self._stop: torch.Tensor | None = None
        if self._stepper is not None and last.ends_run and self._stepper.reads_stop(experts):
            self._stop = self._gradients.stop_on(experts.manager.arena.device)

    @torch.no_grad()
    def wave(self, wave: Wave) -> None:
        """See the protocol."""
        experts, gradients = self._experts, wave.leases[Plane.GRADIENT]
        stepped: list[PageName] = []
        # Numbers that come from the device are asked for when all are on their way.
        together = any(experts.context.backend.measures(gradients.page(*name)) for name in wave.items[:1])
        for names in (wave.items,) if together else ((name,) for name in wave.items):
            for name in names:
                self._gradients.complete(experts, name, gradients.page(*name), scale=self._scale)
                self._gradients.done.add((experts, name))
            if self._stepper is not None and (self._stop is not None or self._gradients.non_finite is None):
                stepped += self._step(self._stepper, wave, names, first=not stepped)
        if stepped:
            self._gradients.stepped.update((experts, name) for name in stepped)
            gradients.release()
            experts.manager.drop(experts.page_ids(Plane.GRADIENT, stepped))

    def _step(self, stepper: PageStepper, wave: Wave, names: Sequence[PageName], *, first: bool) -> list[PageName]:
        """Steps pages of a wave; those that were."""
        experts, stepped = self._experts, []
        if first:
            wave.leases[Plane.WEIGHT].mark_dirty()
        for name in names:
            pages = {plane: wave.leases[plane].page(*name) for plane in (Plane.WEIGHT, Plane.GRADIENT)}
            with leased(experts, name, self.planes, deciding=stepper.deciding) as others:
                if stepper.step_at_once(experts, name, {**pages, **others}, stop=self._stop):
                    stepped.append(name)
        return stepped


@contextmanager
def leased(
    experts: PagedExperts, name: PageName, planes: Sequence[Plane], *, deciding: tuple[Plane, ...] = ()
) -> Iterator[dict[Plane, torch.Tensor]]:
    """A page's elements in ``planes``, to be written; moments that do not exist yet are made as zeros.

    Where those of planes ``deciding`` lie in host memory, what lies there is handed out as it is.
    """
    manager = experts.manager
    ids = np.concatenate([experts.page_ids(plane, [name]) for plane in planes])
    for plane, page_id in zip(planes, ids, strict=True):
        if plane in (Plane.MOMENT1, Plane.MOMENT2):
            for new in manager.create_ids(experts.pages, plane, np.array([page_id])).tolist():
                manager.page_tensor(new).zero_()
    work = PageWork(manager, ids, deciding=deciding)
    try:
        manager.mark_dirty(ids)
        yield dict(zip(planes, work.tensors(), strict=True))
    finally:
        work.release()

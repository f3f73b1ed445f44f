"""Steps of pages in host memory: gradients come down and new weights go up while other pages are stepped.

One page's copies and another's step go on at once: what a page needs from the device is asked for when the page comes
up, and it is stepped when the next one does. Then its weight goes up, beside that next step. Nobody waits for it before
the page is leased again [Note: order of copies]. Where device and host are one memory, nothing is copied and a page is
stepped when it comes up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from megascale_omni.paging.copies import StreamCopier
from megascale_omni.paging.planes import Plane
from megascale_omni.paging.streams import Event

Pages = dict[Plane, torch.Tensor]
Work = Callable[[Pages], None]

SETS = 2
"""Sets of staging buffers: one page is stepped while the next one's gradient comes down."""


@dataclass
class _Buffers:
    """Staging memory of one page, and the copy that may still read it."""

    tensors: Pages = field(default_factory=dict)
    read_by: Event | None = None


@dataclass
class _Coming:
    """A page that waits for what comes down: its tensors in host memory, and those of them that go up again."""

    here: Pages
    away: Pages
    work: Work
    let_go: Callable[[], None]
    down: Event | None
    buffers: _Buffers


class HostSteps:
    """Steps pages whose moments lie in host memory. ``copier`` None: the arenas are one memory."""

    def __init__(self, copier: StreamCopier | None) -> None:
        self._copier = copier
        self._sets = [_Buffers() for _ in range(SETS)]
        self._turn = 0
        self._waiting: _Coming | None = None

    @property
    def waits(self) -> bool:
        """Whether a page may be stepped after the call that hands it over: its hold must last until then."""
        return self._copier is not None

    def step(
        self,
        pages: Mapping[Plane, torch.Tensor],
        work: Work,
        *,
        here: Collection[Plane],
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        """Has ``work`` done on a page's tensors, all of them in host memory.

        What is not ``here``, but on the device, comes down first; parameters and weights go up again. ``let_go`` is
        called when the pages are needed no more.
        """
        if self._copier is None:
            work(dict(pages))
            let_go()
            return
        copier, buffers = self._copier, self._sets[self._turn]
        self._turn = (self._turn + 1) % SETS
        if buffers.read_by is not None:
            copier.streams.host_waits(buffers.read_by)
            buffers.read_by = None
        away = {plane: page for plane, page in pages.items() if plane not in here}
        room = {plane: self._room(buffers, plane, page) for plane, page in away.items()}
        # A weight beside a master is written, not read.
        coming = [(away[p], room[p]) for p in away if p is not Plane.WEIGHT or Plane.MASTER not in pages]
        down = copier.fetch(coming, after=[copier.streams.mark()]) if coming else None
        written: Pages = {plane: page for plane, page in away.items() if plane is not Plane.GRADIENT}
        before = self._waiting
        self._waiting = _Coming({**pages, **room}, written, work, let_go, down, buffers)
        if before is not None:
            self._do(before)

    def _room(self, buffers: _Buffers, plane: Plane, page: torch.Tensor) -> torch.Tensor:
        assert self._copier is not None
        nbytes = page.numel() * page.element_size()
        buffer = buffers.tensors.get(plane)
        if buffer is None or buffer.numel() < nbytes:
            buffer = buffers.tensors[plane] = self._copier.streams.staging(nbytes)
        return buffer[:nbytes].view(page.dtype)

    def _do(self, page: _Coming) -> None:
        """The step of a page, when what it waits for has come; its weight starts going up."""
        copier = self._copier
        assert copier is not None
        try:
            if page.down is not None:
                copier.streams.host_waits(page.down)
            page.work(page.here)
            if page.away:
                going = [(page.here[plane], there) for plane, there in page.away.items()]
                # What reads the old weight has been given to compute by now.
                page.buffers.read_by = copier.bring(going, after=[copier.streams.mark()])
        finally:
            page.let_go()

    def finish(self) -> None:
        """Steps the page that is still waiting."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._do(waiting)

    def give_up(self) -> None:
        """Lets go of the page that is still waiting, unstepped: something else has failed."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            if waiting.down is not None and self._copier is not None:
                self._copier.streams.host_waits(waiting.down)
            waiting.let_go()

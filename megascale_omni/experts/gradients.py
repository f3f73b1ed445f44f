"""Gradient pages between the last backward and the optimizer: scaled, reduced, measured and dropped.

Pages of experts without tokens are absent and count as zeros; nothing here makes one unless another rank has it. What
must be done to every page is done in one sweep (:meth:`ExpertGradients.finish`), because a sweep over pages that do not
all fit costs io.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from megascale_omni.clipping.statistics import GradientStatistics, Scratch, statistics_of
from megascale_omni.config import GradWire
from megascale_omni.experts.completion import OFF, LastGradients
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.page_statistics import ComingStatistics, PageStatistics, fault_of, stock_tensors
from megascale_omni.experts.reduction import PageReducer, exchange_touched, owners_of, plan_reductions
from megascale_omni.experts.shards import PageName, PageShards
from megascale_omni.groups.channel import Channel
from megascale_omni.paging.planes import Plane
from megascale_omni.schedule import Phase


class ExpertGradients:
    """The gradient pages of some modules (those of one model chunk).

    ``wire``: what gradients travel in between copies of an expert: as they are, or rounded to bf16.
    Where kernels measure, numbers stay on the device until somebody asks for one: then the host waits once, for all.
    ``takes_norms``, ``counts_zeros``, ``takes_sums``: what is measured of each page on the way; what is not costs a
    sweep later. ``by_tensor``: norms of experts that are one page are taken tensor by tensor, each in the layout that
    it has in a stock model, so that they have stock's bits.
    """

    def __init__(self, modules: Sequence[PagedExperts], *, wire: GradWire = "fp32") -> None:
        self.modules = tuple(modules)
        self.wire = wire
        self._channel: Channel | None = None
        self.takes_norms = True
        self.by_tensor = False
        self.counts_zeros = True
        self.takes_sums = False
        self._scratch: Scratch = {}
        self._non_finite: str | None = None
        self._coming: list[ComingStatistics] = []
        self._stop: torch.Tensor | None = None
        self._statistics: dict[tuple[PagedExperts, PageName], PageStatistics] = {}
        self.last: LastGradients | None = None  # who completes pages in the backward already
        self._uses: dict[PagedExperts, int] = {}  # by the optimizer, when pages were measured
        self.done: set[tuple[PagedExperts, PageName]] = set()
        """Pages of this step that are complete: checked, scaled and measured."""
        self.stepped: set[tuple[PagedExperts, PageName]] = set()
        """Those of them that have been applied and are gone."""

    @property
    def non_finite(self) -> str | None:
        """The first gradient of this step that is not finite, and what is wrong with it."""
        self._read()
        return self._non_finite

    def stop_on(self, device: torch.device) -> torch.Tensor:
        """int32 ``[1]``: how many gradients completed in this step are not finite, as the device sees it."""
        if self._stop is None:
            self._stop = torch.zeros(1, dtype=torch.int32, device=device)
        return self._stop

    def present(self, experts: PagedExperts) -> list[PageName]:
        """The pages (expert, slice) of a module that have a gradient, ascending."""
        return [(int(e), int(s)) for e, s in np.argwhere(experts.manager.present(experts.pages, Plane.GRADIENT))]

    def pages(
        self, experts: PagedExperts, *, names: list[PageName] | None = None, write: bool = False
    ) -> Iterator[tuple[PageName, torch.Tensor]]:
        """Each present gradient page of a module with its elements (flat), leased while it is the current item."""
        names = self.present(experts) if names is None else names
        sweep = experts.manager.sweep(experts.pages, names, planes=(Plane.GRADIENT,), phase=Phase.STEP, write=write)
        for name, (page,) in sweep:
            yield name, page

    def drop(self) -> None:
        """Forgets all gradients: a new step begins, nothing of the old one may be applied again."""
        for experts in self.modules:
            experts.manager.drop(experts.page_ids(Plane.GRADIENT, self.present(experts)))
            experts.context.completion.renew()
        self._statistics.clear()
        self._uses.clear()
        self.done.clear()
        self.stepped.clear()
        self._non_finite = self._stop = None
        self._coming.clear()
        if self.last is not None:
            self.last.reset()

    def finish(
        self, *, scale: float = 1.0, group: dist.ProcessGroup | None = None, shards: PageShards | None = None
    ) -> None:
        """What stock does to its buffers after the last backward: multiplies by ``scale``, sums over ``group``.

        Takes each page's statistics on the way, and keeps the first local gradient that is not finite in
        ``non_finite``. A page that another rank of the group has and this one does not is created; where ``shards``
        (of the same group) divide the optimizer's state, a page stays with its owner only, and is dropped elsewhere
        (see [Note: reduction of pages]). A collective of ``group``.

        Raises:
            RuntimeError: a backward has completed pages already, with another ``scale`` or without ``group``.
        """
        shards = shards or PageShards()
        alone = group is None or dist.get_world_size(group) == 1
        if self.done and (not alone or self.last is None or self.last.scale != scale):
            raise RuntimeError(
                f"gradients were completed in the backward, and are to be scaled by {scale} or reduced now"
            )
        if alone or group is None:
            for experts in self.modules:
                names = [name for name in self.present(experts) if (experts, name) not in self.done]
                for name, page in self.pages(experts, names=names, write=scale != 1.0):
                    self.complete(experts, name, page, scale=scale)
            return
        channel = self._channel_of(group)
        if shards.size not in (1, channel.size):
            raise RuntimeError(f"optimizer state is divided among {shards.size} ranks, gradients among {channel.size}")
        for experts, touched_RP in zip(self.modules, exchange_touched(self.modules, channel), strict=True):
            self._reduce(experts, touched_RP, scale=scale, channel=channel, shards=shards)

    def _channel_of(self, group: dist.ProcessGroup) -> Channel:
        if self._channel is None or self._channel.group is not group:
            self._channel = Channel(group)
        return self._channel

    def complete(self, experts: PagedExperts, name: PageName, page: torch.Tensor, *, scale: float) -> None:
        """Checks, scales and measures a page, to which nothing will be added in this step."""
        # Sums look at every element, and a norm tells too: a page that stays as it is needs no pass more.
        measured = self.takes_sums or (self.takes_norms and scale == 1.0)
        if self._stays_there(experts, name, page, scale=scale):
            return
        if not measured:
            self._check(experts, name, page)
        if scale != 1.0:
            page.mul_(scale)
        found = self._statistics[experts, name] = self._measure(experts, page)
        if found.sums is not None:
            bad = bool(found.sums.non_finite)
        else:
            bad = measured and found.squares is not None and not math.isfinite(found.squares)
        if bad:
            self._check(experts, name, page)

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiplies every gradient, as stock multiplies its buffers; statistics follow by arithmetic.

        Raises:
            RuntimeError: experts have been stepped by some of them.
        """
        if self.stepped:
            raise RuntimeError(f"gradients are scaled after experts were stepped by them; {OFF}")
        self._read()
        for experts in self.modules:
            for names, pages in self._pages_together(experts):
                experts.manager.bulk.scale([pages], [factor])
                for name in names:
                    self._scale_statistics((experts, name), factor)

    def _pages_together(self, experts: PagedExperts) -> Iterator[tuple[list[PageName], list[torch.Tensor]]]:
        """All gradient pages of a module, to be written: at once where all pages are here, else one by one."""
        if experts.manager.pager.can_evict:
            for name, page in self.pages(experts, write=True):
                yield [name], [page]
        elif names := self.present(experts):
            with experts.lease(Plane.GRADIENT, names) as lease:
                lease.mark_dirty()
                yield names, [lease.page(*name) for name in names]

    def _scale_statistics(self, key: tuple[PagedExperts, PageName], factor: float | torch.Tensor) -> None:
        known = self._statistics.get(key)
        if known is not None:
            # Scaled norms are not to the bit those of scaled tensors.
            scaled = known.norms is not None and not self.by_tensor
            norms = tuple(norm * abs(float(factor)) for norm in known.norms or ()) if scaled else None
            sums = None if known.sums is None else known.sums.scaled(float(factor))
            self._statistics[key] = PageStatistics(norms, known.nonzeros, sums)

    def squares(self, shards: PageShards) -> float:
        """Sum of squares of gradients this rank owns under ``shards``. Frozen modules have no gradients."""
        self.takes_norms = True
        return sum(found.squares or 0.0 for experts in self.modules for _, found in self._owned(experts, shards))

    def norms(self, experts: PagedExperts, shards: PageShards) -> dict[PageName, tuple[float, ...]]:
        """Norms of the gradients of a module that this rank owns, by page; absent pages have none."""
        self.takes_norms = True
        return {name: found.norms or () for name, found in self._owned(experts, shards)}

    def zeros(self, shards: PageShards) -> int:
        """Zeros among gradients this rank owns; absent pages are zeros, frozen modules have none."""
        self.counts_zeros = True
        zeros = 0
        for experts in self.modules:
            if experts.trainable:
                zeros += sum(experts.layout.page_numel(name[1]) for name in shards.owned(experts))
                zeros -= sum(found.nonzeros or 0 for _, found in self._owned(experts, shards))
        return zeros

    def sums(self, experts: PagedExperts, shards: PageShards) -> GradientStatistics:
        """The sums of one module's gradients that this rank owns; elements of experts without tokens do not count.

        Pages of those are absent, or all zero where a layer pads what it sends to its experts.
        """
        self.takes_sums = True
        by_expert: dict[int, list[GradientStatistics]] = {}
        for (expert, _), page in self._owned(experts, shards):
            if page.sums is not None:
                by_expert.setdefault(expert, []).append(page.sums)
        touched = [pages for pages in by_expert.values() if any(s.absolute or s.non_finite for s in pages)]
        found = [page for pages in touched for page in pages]
        return GradientStatistics(
            count=math.fsum(s.count for s in found),
            total=sum(s.total for s in found),
            absolute=sum(s.absolute for s in found),
            squares=sum(s.squares for s in found),
            non_finite=math.fsum(s.non_finite for s in found),
            largest=max((s.largest for s in found), default=0.0),
        )

    def _owned(self, experts: PagedExperts, shards: PageShards) -> list[tuple[PageName, PageStatistics]]:
        """What was measured of the present pages of a module that this rank owns; measures what was not."""
        if not experts.trainable:
            return []
        completion = experts.context.completion
        completion.check()
        self._read()
        if completion.uses != self._uses.get(experts, 0):  # clipping multiplies them in place
            self._uses[experts] = completion.uses
            self._statistics = {key: found for key, found in self._statistics.items() if key[0] is not experts}
        here = set(self.present(experts)) | {name for module, name in self.stepped if module is experts}
        owned = [name for name in shards.owned(experts) if name in here]
        missing = [name for name in owned if not self._is_measured(self._statistics.get((experts, name)))]
        if any((experts, name) in self.stepped for name in missing):
            raise RuntimeError(
                f"{experts.path}: more is asked of gradients than was measured before they were used; {OFF}"
            )
        for name, page in self.pages(experts, names=missing):
            self._take_statistics(experts, name, page)
        self._read()
        return [(name, self._statistics[experts, name]) for name in owned]

    def _is_measured(self, found: PageStatistics | None) -> bool:
        if found is None or (self.takes_norms and found.squares is None):
            return False
        return not (self.counts_zeros and found.nonzeros is None) and not (self.takes_sums and found.sums is None)

    def _take_statistics(self, experts: PagedExperts, name: PageName, page: torch.Tensor) -> None:
        """Measures a page that was checked already, where it is if the backend can."""
        if not self._stays_there(experts, name, page, checks=False):
            self._statistics[experts, name] = self._measure(experts, page)

    def _measure(self, experts: PagedExperts, page: torch.Tensor) -> PageStatistics:
        """Of one page, flat, in its own dtype."""
        norms, nonzeros, sums = None, None, None
        if self.takes_norms:
            norms = tuple(float(norm) for norm in self._norms(experts, page))
        if self.counts_zeros:
            nonzeros = int(torch.count_nonzero(page))
        if self.takes_sums:
            sums = statistics_of([page], self._scratch)
        return PageStatistics(norms, nonzeros, sums)

    def _norms(self, experts: PagedExperts, page: torch.Tensor) -> Iterator[torch.Tensor]:
        by_tensor = self.by_tensor and experts.layout.num_slices == 1
        for part in stock_tensors(experts, page) if by_tensor else (page,):
            yield torch.linalg.vector_norm(part, dtype=torch.float32)

    def _stays_there(
        self, experts: PagedExperts, name: PageName, page: torch.Tensor, *, scale: float = 1.0, checks: bool = True
    ) -> bool:
        """Scales and measures a page with the backend's kernels, if it has any: nobody waits for the numbers yet."""
        backend = experts.context.backend
        if not backend.measures(page):
            return False
        check = None if self.takes_sums or not checks else torch.linalg.vector_norm(page, dtype=torch.float32)
        if scale != 1.0:
            page.mul_(scale)
        seven = backend.statistics(page)
        norms = tuple(self._norms(experts, page)) if self.takes_norms else None
        self._statistics.pop((experts, name), None)
        self._coming.append(ComingStatistics(experts, name, check, norms, seven, self.counts_zeros, self.takes_sums))
        if self._stop is not None:
            self._stop += seven[5:6] > 0 if check is None else ~torch.isfinite(check)
        return True

    def _read(self) -> None:
        """Brings what was measured to the host: one wait."""
        coming, self._coming = self._coming, []
        if not coming:
            return
        numbers = iter(torch.cat([tensor.double() for entry in coming for tensor in entry.tensors()]).tolist())
        for entry in coming:
            found, wrong = entry.read(numbers)
            if entry.kept:
                self._statistics[entry.experts, entry.name] = found
            self._non_finite = self._non_finite or wrong

    # -- reduction -----------------------------------------------------------------------------------------------------

    def _reduce(
        self, experts: PagedExperts, touched_RP: np.ndarray, *, scale: float, channel: Channel, shards: PageShards
    ) -> None:
        entry = experts.pages.entry
        owners_P = owners_of(shards, entry.num_pages) if shards.size > 1 else None
        plan = plan_reductions(touched_RP, num_slices=entry.num_slices, owners_P=owners_P)

        def read(names: list[PageName], parts: dict[PageName, torch.Tensor]) -> None:
            for name, page in self.pages(experts, names=names):
                self._check_part(experts, name, page)
                parts[name].copy_(page)
                if scale != 1.0:
                    parts[name].mul_(scale)

        wire = torch.bfloat16 if self.wire == "bf16" else None
        device, bulk = experts.manager.arena.device, experts.manager.bulk
        reducer = PageReducer(channel, sharded=shards.size > 1, wire=wire, device=device, bulk=bulk)
        here = set(self.present(experts))
        for name, total in reducer.reduce(experts, plan, read):
            if total is None:
                if name in here:
                    experts.manager.drop(experts.page_ids(Plane.GRADIENT, [name]))
                continue
            if name not in here:
                experts.manager.create_ids(experts.pages, Plane.GRADIENT, experts.page_ids(Plane.GRADIENT, [name]))
            with experts.lease(Plane.GRADIENT, [name]) as lease:
                lease.page(*name).copy_(total)
                lease.mark_dirty()
            self._take_statistics(experts, name, total)

    def _check_part(self, experts: PagedExperts, name: PageName, page: torch.Tensor) -> None:
        """Checks this rank's part of a sum; where kernels measure, all parts are heard of at once, later."""
        backend = experts.context.backend
        if not backend.measures(page):
            self._check(experts, name, page)
            return
        norm = torch.linalg.vector_norm(page, dtype=torch.float32)
        self._coming.append(
            ComingStatistics(experts, name, norm, None, backend.statistics(page), False, False, kept=False)
        )

    def _check(self, experts: PagedExperts, name: PageName, page: torch.Tensor) -> None:
        if self._non_finite is None and not math.isfinite(float(torch.linalg.vector_norm(page, dtype=torch.float32))):
            self._non_finite = fault_of(experts, name, int((~torch.isfinite(page)).sum()))

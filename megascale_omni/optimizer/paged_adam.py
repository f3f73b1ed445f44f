"""PagedAdam: Adam and AdamW over pages, in the arithmetic of the dense optimizer that the run would have used.

Its parameter groups look like torch's, with ``params`` empty: schedulers set ``lr`` and ``weight_decay`` there. A page
has a region of weights and a region of biases, which may belong to different groups (stock does not decay biases).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from megascale_omni.experts.completion import OFF
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.shards import PageName, PageShards
from megascale_omni.optimizer.arithmetic import AdamArithmetic
from megascale_omni.optimizer.coming import ComingStep
from megascale_omni.optimizer.fetch import PageFetcher
from megascale_omni.optimizer.history import History
from megascale_omni.optimizer.replay_ahead import ReplayAhead
from megascale_omni.optimizer.state_sweeps import MOMENTS, PageStep, StateSweeps, forget_gradients
from megascale_omni.optimizer.state_tensors import StateTensors, master_plane
from megascale_omni.optimizer.together import Together
from megascale_omni.paging.leases import PagedModule
from megascale_omni.paging.planes import Plane
from megascale_omni.paging.tiers import ABSENT


@dataclass(frozen=True)
class GroupBinding:
    """Indices of the parameter groups of a module's weights and biases (``biases`` None where it has none)."""

    weights: int
    biases: int | None


DEFAULT_MAX_LAG = 100


class PagedAdam:
    """Optimizer of the experts' pages.

    [Note: deferred steps]
    An expert without tokens changes under Adam all the same: its moments decay, and its weights with them. Its pages
    are not touched at the step; what they missed is replayed from the history, operation by operation, when they are
    read next (``catch_up``), so that every bit is what the dense optimizer would have made. With weight decay a replay
    never ends early, hence no page is left more than ``max_lag`` steps behind. A page without moments never had a
    gradient: its moments are zeros and stay absent, unless weight decay is a part of the gradient (L2).

    Args:
        modules: paged experts with their bindings. groups: torch-like parameter groups (lr, weight_decay, betas, eps,
        ...). arithmetic: the dense optimizer's operations. shards: which pages' state this rank keeps and steps.
        max_lag: most steps a page may be behind; 0 steps every page at every step. on_demand: whether ranks fetch the
        pages that they need (see [Note: pages on demand]); otherwise sharded state is never deferred, and updated
        weights go to every rank at each step. in_host: whether pages whose moments lie in host memory are stepped there
        (see [Note: where the state lies]).
    """

    def __init__(
        self,
        modules: Iterable[tuple[PagedExperts, GroupBinding]],
        *,
        groups: list[dict[str, Any]],
        arithmetic: AdamArithmetic,
        shards: PageShards,
        max_lag: int = DEFAULT_MAX_LAG,
        on_demand: bool = False,
        in_host: bool = False,
    ) -> None:
        self.bindings = dict(modules)
        self.param_groups = groups
        self.arithmetic = arithmetic
        self.shards = shards
        self.fetcher: PageFetcher | None = None
        if on_demand and shards.size > 1:
            self.fetcher = PageFetcher(
                shards, stale=self._is_stale, catch_up=self.catch_up_owned, fetched=self._have_fetched
            )
        self.max_lag = max_lag if shards.size == 1 or self.fetcher is not None else 0
        self.history = History()
        self.num_steps = 0
        self.before_step: Callable[[], None] = lambda: None  # who wants to know before anything changes
        self._coming = ComingStep()
        self._sweeps = StateSweeps(in_host=in_host)
        self.tensors = StateTensors(self)
        self._owned_names: dict[PagedExperts, set[PageName]] = {}
        self._by_module = {experts.pages.entry.module: experts for experts in self.modules}
        for experts in self.modules:
            self._sweeps.prepare(experts.manager)
            manager, ids = experts.manager, experts.manager.ids(experts.pages, Plane.WEIGHT, range(experts.num_experts))
            manager.catch_up(experts.pages, ids)  # an optimizer before this one
            waits = self.shards.size == 1 or self.fetcher is not None
            manager.set_catch_up(experts.pages, self if waits else None, ahead=ReplayAhead(self))
            experts.fetch = None if self.fetcher is None else partial(self.fetch_experts, experts)
            manager.table.last_step[ids] = 0
            if Plane.MASTER in experts.pages.dtypes:
                for name in self.shards.owned(experts):
                    self._copy_master(experts, name, create=True)

    @property
    def modules(self) -> tuple[PagedExperts, ...]:
        """The modules whose pages are stepped."""
        return tuple(self.bindings)

    # -- state ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Copies weights to fp32 masters: after weights were set from outside."""
        for experts in self.modules:
            if Plane.MASTER in experts.pages.dtypes:
                for name in self.shards.owned(experts):
                    self._copy_master(experts, name, create=False)

    @torch.no_grad()
    def _copy_master(self, experts: PagedExperts, name: PageName, *, create: bool) -> None:
        with experts.lease(Plane.WEIGHT, [name]) as weights:
            if create:
                self._create(experts, Plane.MASTER, name)
            with experts.lease(Plane.MASTER, [name]) as masters:
                masters.mark_dirty()
                masters.page(*name).copy_(weights.page(*name))

    # -- step ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, *, clip_coefficient: float | Mapping[PagedExperts, float] | None = None) -> None:
        """One applied step.

        Gradients are multiplied by ``clip_coefficient`` first where it is given, for all modules or for some. Pages
        without a gradient wait (see [Note: deferred steps]). A collective of the shards' group where state is sharded:
        updated weights go to every rank.
        """
        for experts in self.modules:
            experts.context.completion.check()
        at_once, clipped = self.is_open, clip_coefficient is not None
        records = self._coming.close(self.param_groups, step=self.num_steps + 1, clipped=clipped)
        self.num_steps += 1
        for index, record in enumerate(records):
            self.history.append(index, record)
        for experts in self.modules:
            clip = clip_coefficient.get(experts) if isinstance(clip_coefficient, Mapping) else clip_coefficient
            present = experts.manager.present(experts.pages, Plane.GRADIENT)
            owned = self.shards.owned(experts)
            stepped = [name for name in owned if present[name]]
            together = Together.of(experts, self.arithmetic, clip=clip)
            step: PageStep = partial(self._step_page, experts, clip=clip)
            replay: PageStep = partial(self._replay_page, experts, up_to=self.num_steps)
            if together is not None:
                step = replay = partial(self.note_page, experts, together)
            self._sweeps.each(experts, stepped, step, also=(Plane.GRADIENT, *MOMENTS))
            forget_gradients(experts, [(int(e), int(s)) for e, s in np.argwhere(present)])
            kept = not experts.manager.pager.can_evict
            experts.context.completion.used(gone=at_once or (bool(present.any()) and not kept))
            late = [n for n in owned if not present[n] and self._lag(experts, n) >= max(1, self.max_lag)]
            moving = [name for name in late if self._has_moments(experts, name)]
            resting = [name for name in late if not self._has_moments(experts, name)]
            for names, also in ((moving, MOMENTS), (resting, ())):
                self._sweeps.each(experts, names, replay, also=also)
            if together is not None:
                together.launch()
            if self.fetcher is None:
                self.tensors.sync_weights(experts)
        for index in range(len(self.param_groups)):
            self.history.trim(index, max(0, self.num_steps - max(1, self.max_lag)))

    # -- a step that begins in the backward ----------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether pages have been stepped at once since the last :meth:`step`, which has to complete their step."""
        return self._coming.is_open

    @property
    def deciding(self) -> tuple[Plane, ...]:
        """See :class:`megascale_omni.experts.completion.PageStepper`."""
        return self._sweeps.deciding

    def planes_at_once(self, experts: PagedExperts) -> tuple[Plane, ...] | None:
        """Planes beside weight and gradient that the step of a page works on; None for modules not stepped here."""
        if experts not in self.bindings:
            return None
        return (Plane.MASTER, *MOMENTS) if Plane.MASTER in experts.pages.dtypes else MOMENTS

    def reads_stop(self, experts: PagedExperts) -> bool:
        """See :class:`megascale_omni.experts.completion.PageStepper`."""
        return self.arithmetic.steps_together(experts.manager.arena.device)

    @torch.no_grad()
    def step_at_once(
        self,
        experts: PagedExperts,
        name: PageName,
        pages: dict[Plane, torch.Tensor],
        *,
        stop: torch.Tensor | None = None,
    ) -> bool:
        """Applies the step that comes next to a page whose gradient is complete; :meth:`step` does so to the others.

        See :class:`megascale_omni.experts.completion.PageStepper`.
        """
        if not self._coming.is_open:
            self.before_step()
            self._coming.open(self.param_groups, step=self.num_steps + 1)
        step: PageStep = partial(self._step_page, experts, clip=None)
        on_device = step if stop is None else partial(self._step_unless, experts, stop)
        return self._sweeps.at_once(experts, name, pages, step, on_device=on_device, stop=stop)

    def _step_unless(
        self, experts: PagedExperts, stop: torch.Tensor, name: PageName, pages: dict[Plane, torch.Tensor]
    ) -> None:
        """The coming step of a page, which stays as it is where the device finds ``stop`` not to be 0."""
        alone = Together(experts, self.arithmetic)
        self.note_page(experts, alone, name, pages, coming=True)
        alone.launch(stop=stop)

    def note_page(
        self,
        experts: PagedExperts,
        together: Together,
        name: PageName,
        pages: dict[Plane, torch.Tensor],
        *,
        coming: bool = False,
    ) -> None:
        """Notes down what a page has missed, and perhaps the coming step; it takes them when all are launched."""
        last, steps = self._last_step(experts, name), []
        for region, group in self._regions(experts, name):
            missed = self.history.since(group, last) if last < self.num_steps else ()  # there may be none yet
            steps.append((region, (*missed, *self._coming.opened[group : group + 1]) if coming else missed))
        together.add(name, pages, steps, step=self.num_steps + coming)

    def _last_step(self, experts: PagedExperts, name: PageName) -> int:
        return int(experts.manager.table.last_step[experts.page_ids(Plane.WEIGHT, [name])[0]])

    def _lag(self, experts: PagedExperts, name: PageName) -> int:
        return self.num_steps - self._last_step(experts, name)

    def _step_page(
        self, experts: PagedExperts, name: PageName, pages: dict[Plane, torch.Tensor], *, clip: float | None
    ) -> None:
        last = self._last_step(experts, name)
        # Stock copies a narrower gradient to fp32 before it clips.
        gradient = pages[Plane.GRADIENT]
        gradient = gradient if gradient.dtype is torch.float32 else gradient.float()
        if clip is not None:
            gradient.mul_(clip)
        p, m, v = pages[master_plane(experts)], pages[Plane.MOMENT1], pages[Plane.MOMENT2]
        for region, group in self._regions(experts, name):
            missed = self.history.since(group, last) if last < self.num_steps else ()  # there may be none yet
            records = (*missed, *self._coming.opened[group : group + 1])
            self.arithmetic.advance(p=p[region], m=m[region], v=v[region], g=gradient[region], records=records)
        self._applied(experts, name, pages)

    def _replay_page(
        self, experts: PagedExperts, name: PageName, pages: dict[Plane, torch.Tensor], *, up_to: int
    ) -> None:
        """Applies the steps of zero gradient that a page missed, up to ``up_to``; moments not in ``pages`` are 0."""
        last = self._last_step(experts, name)
        if last >= up_to:
            return
        p = pages[master_plane(experts)]
        m, v = (pages[plane] if plane in pages else torch.zeros_like(p) for plane in MOMENTS)
        for region, group in self._regions(experts, name):
            records = self.history.since(group, last)[: up_to - last]
            self.arithmetic.replay(p=p[region], m=m[region], v=v[region], records=records)
        self._applied(experts, name, pages, step=up_to)

    def _applied(
        self, experts: PagedExperts, name: PageName, pages: dict[Plane, torch.Tensor], step: int | None = None
    ) -> None:
        if Plane.MASTER in pages:
            pages[Plane.WEIGHT].copy_(pages[Plane.MASTER])
        step = self.num_steps + self.is_open if step is None else step
        experts.manager.table.last_step[experts.page_ids(Plane.WEIGHT, [name])] = step

    def _regions(self, experts: PagedExperts, name: PageName) -> list[tuple[slice, int]]:
        """The regions of a page and their parameter groups."""
        binding, cut = self.bindings[experts], experts.layout.matrix_numel(name[1])
        regions = [(slice(0, cut), binding.weights)]
        if binding.biases is not None:
            regions.append((slice(cut, experts.layout.page_numel(name[1])), binding.biases))
        return regions

    # -- catching up ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def catch_up(self, module: PagedModule, page_ids: np.ndarray) -> None:
        """Replays what the weight pages ``page_ids`` of a module have missed; called before they are read."""
        experts = self._by_module.get(module.entry.module)
        if experts is None:
            return
        if experts.manager.whole.unsettled:
            experts.manager.whole.settle()
        last_steps = experts.manager.table.last_step[page_ids]
        if self.is_open and (last_steps > self.num_steps).any():
            raise RuntimeError(
                f"{experts.path}: weights are read between backward and optimizer step, where some have been stepped "
                f"and others have not; read them after the step, or set {OFF}"
            )
        together = Together.of(experts, self.arithmetic)
        for page_id in page_ids[last_steps < self.num_steps].tolist():
            key = experts.manager.key(page_id)
            name = (key.expert, key.slice)
            if self.fetcher is not None and name not in self._owned_by(experts):
                raise RuntimeError(
                    f"{experts.path}, local expert {key.expert} (slice {key.slice}): its weights are those of step "
                    f"{self._last_step(experts, name)} of {self.num_steps} here, and were not fetched; call "
                    "PagedAdam.fetch_all() on all ranks before they are read outside of the model's forward"
                )
            self._catch_up_page(experts, name, together)
        if together is not None:
            together.launch()

    def experts_of(self, module: PagedModule) -> PagedExperts | None:
        """The experts of a module, where this optimizer steps them."""
        return self._by_module.get(module.entry.module)

    def is_behind(self, module: PagedModule, page_ids: np.ndarray) -> np.ndarray:
        """Mask: which weight pages of a module have missed a step."""
        experts = self._by_module.get(module.entry.module)
        if experts is None:
            return np.zeros(len(page_ids), dtype=bool)
        behind: np.ndarray = experts.manager.table.last_step[page_ids] < self.num_steps
        return behind

    # -- pages on demand -----------------------------------------------------------------------------------------------

    def _owned_by(self, experts: PagedExperts) -> set[PageName]:
        if experts not in self._owned_names:
            self._owned_names[experts] = set(self.shards.owned(experts))
        return self._owned_names[experts]

    def _is_stale(self, experts: PagedExperts, name: PageName) -> bool:
        return self._last_step(experts, name) < self.num_steps

    def catch_up_owned(self, experts: PagedExperts, name: PageName) -> None:
        self.catch_up(experts.pages, experts.page_ids(Plane.WEIGHT, [name]))

    def _have_fetched(self, experts: PagedExperts, names: list[PageName]) -> None:
        experts.manager.table.last_step[experts.page_ids(Plane.WEIGHT, names)] = self.num_steps

    @torch.no_grad()
    def fetch_experts(self, experts: PagedExperts, wanted: Iterable[int]) -> None:
        """Makes all pages of some local experts current on this rank. A collective where pages come on demand."""
        if self.fetcher is not None:
            self.fetcher.fetch(experts, [(e, s) for e in wanted for s in range(experts.layout.num_slices)])

    def fetch_all(self, experts: PagedExperts) -> None:
        """Makes all pages of a module current on this rank. A collective where pages come on demand."""
        self.fetch_experts(experts, range(experts.num_experts))

    def _catch_up_page(self, experts: PagedExperts, name: PageName, together: Together | None) -> None:
        planes = [Plane.WEIGHT, Plane.MASTER] if Plane.MASTER in experts.pages.dtypes else [Plane.WEIGHT]
        planes += MOMENTS if self._has_moments(experts, name) else ()
        replay: PageStep = partial(self._replay_page, experts, up_to=self.num_steps)
        if together is not None:
            replay = partial(self.note_page, experts, together)
        self._sweeps.one(experts, name, replay, planes=planes)

    def _create(self, experts: PagedExperts, plane: Plane, name: PageName) -> np.ndarray:
        return experts.manager.create_ids(experts.pages, plane, experts.page_ids(plane, [name]))

    def _has_moments(self, experts: PagedExperts, name: PageName) -> bool:
        """Whether a page that gets no gradient has moments that are not zero, or will have by the steps it missed."""
        if experts.manager.table.tier[experts.page_ids(Plane.MOMENT1, [name])] != ABSENT:
            return True
        if self.arithmetic.decoupled:
            return False
        last = self._last_step(experts, name)
        return any(
            record.weight_decay
            for _, group in self._regions(experts, name)
            for record in self.history.since(group, last)
        )

    def catch_up_all(self) -> None:
        """Brings every owned page up to date."""
        for experts in self.modules:
            self.catch_up(experts.pages, experts.page_ids(Plane.WEIGHT, self.shards.owned(experts)))

    def set_num_steps(self, steps: int) -> None:
        """Sets the number of applied steps, as read from a checkpoint whose pages have all seen them."""
        self.num_steps = steps
        self.history = History()
        for experts in self.modules:
            ids = experts.manager.ids(experts.pages, Plane.WEIGHT, range(experts.num_experts))
            experts.manager.table.last_step[ids] = steps

"""PagedAdam: Adam and AdamW over pages, in the arithmetic of the dense optimizer that the run would have used.

Its parameter groups look like torch's, with ``params`` empty: schedulers set ``lr`` and ``weight_decay`` there. A
page has a region of weights and a region of biases, which may belong to different groups (stock does not decay
biases).

Here every page is stepped at every step. The history is written all the same: what a page has missed can be replayed
from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.shards import PageName, PageShards, broadcast_owned
from megascale_omni.optimizer.arithmetic import AdamArithmetic
from megascale_omni.optimizer.history import History, StepRecord
from megascale_omni.paging.planes import Plane


@dataclass(frozen=True)
class GroupBinding:
    """Indices of the parameter groups of a module's weights and biases (``biases`` None where it has none)."""

    weights: int
    biases: int | None


def master_plane(experts: PagedExperts) -> Plane:
    """The fp32 plane that the optimizer steps: MASTER where the module has one, its fp32 weights otherwise."""
    return Plane.MASTER if Plane.MASTER in experts.pages.dtypes else Plane.WEIGHT


class PagedAdam:
    """Optimizer of the experts' pages.

    Args:
        modules: paged experts with their bindings. groups: torch-like parameter groups (lr, weight_decay, betas, eps,
        ...). arithmetic: the dense optimizer's operations. shards: which pages' state this rank keeps and steps.
    """

    def __init__(
        self,
        modules: Iterable[tuple[PagedExperts, GroupBinding]],
        *,
        groups: list[dict[str, Any]],
        arithmetic: AdamArithmetic,
        shards: PageShards,
    ) -> None:
        self.bindings = dict(modules)
        self.param_groups = groups
        self.arithmetic = arithmetic
        self.shards = shards
        self.history = History()
        self.num_steps = 0
        for experts in self.modules:
            if Plane.MASTER in experts.pages.dtypes:
                self._make(experts, Plane.MASTER)
        self.refresh_masters()

    @property
    def modules(self) -> tuple[PagedExperts, ...]:
        """The modules whose pages are stepped."""
        return tuple(self.bindings)

    # -- state -------------------------------------------------------------------------------------------------------

    def ensure_state(self) -> None:
        """Makes the moments (zeros) of every owned page that has none yet."""
        for experts in self.modules:
            for plane in (Plane.MOMENT1, Plane.MOMENT2):
                for page_id in self._make(experts, plane):
                    experts.manager.page_tensor(page_id).zero_()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Copies weights to fp32 masters: after weights were set from outside."""
        for experts in self.modules:
            if Plane.MASTER in experts.pages.dtypes:
                for name, (weight, master) in self._owned_pages(experts, (Plane.WEIGHT, Plane.MASTER)):
                    master.copy_(weight)
                    self._mark(experts, Plane.MASTER, name)

    def _make(self, experts: PagedExperts, plane: Plane) -> list[int]:
        names = self.shards.owned(experts)
        experts.manager.reserve(experts.pages, plane, len(names))
        created: list[int] = experts.manager.create_ids(experts.pages, plane, experts.page_ids(plane, names)).tolist()
        return created

    def _owned_pages(
        self, experts: PagedExperts, planes: Sequence[Plane]
    ) -> Iterator[tuple[PageName, tuple[torch.Tensor, ...]]]:
        """Each owned page's elements in ``planes``, leased while it is the current item."""
        for name in self.shards.owned(experts):
            leases = [experts.lease(plane, [name]) for plane in planes]
            try:
                yield name, tuple(lease.page(*name) for lease in leases)
            finally:
                for lease in leases:
                    lease.release()

    def _mark(self, experts: PagedExperts, plane: Plane, name: PageName) -> None:
        experts.manager.table.dirty[experts.page_ids(plane, [name])] = True

    # -- step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, *, clip_coefficient: float | None = None) -> None:
        """One applied step of every page.

        Gradients are multiplied by ``clip_coefficient`` first, in place, where it is given. Experts without a gradient
        page take a step of zero gradient: their moments decay and their weights with them. A collective of the shards'
        group where state is sharded: updated weights go to every rank.
        """
        self.ensure_state()
        self.num_steps += 1
        records = [self._record(index) for index in range(len(self.param_groups))]
        for experts in self.modules:
            self._step_module(experts, records, clip_coefficient)
            self.sync_weights(experts)

    def _record(self, index: int) -> StepRecord:
        group = self.param_groups[index]
        beta1, beta2 = group["betas"]
        record = StepRecord(
            step=self.num_steps,
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
        )
        self.history.append(index, record)
        return record

    def _step_module(self, experts: PagedExperts, records: list[StepRecord], clip: float | None) -> None:
        manager, master = experts.manager, master_plane(experts)
        has_gradient = manager.present(experts.pages, Plane.GRADIENT)
        planes = (master, Plane.MOMENT1, Plane.MOMENT2)
        for name, (p, m, v) in self._owned_pages(experts, planes):
            gradient = None
            if has_gradient[name]:
                with experts.lease(Plane.GRADIENT, [name]) as lease:
                    gradient = lease.page(*name)
                    # Stock copies a narrower gradient to fp32 before it clips.
                    gradient = gradient if gradient.dtype is torch.float32 else gradient.float()
                    if clip is not None:
                        gradient.mul_(clip)
                    self._step_page(experts, name, (p, m, v), gradient, records)
            else:
                self._step_page(experts, name, (p, m, v), None, records)
            if master is Plane.MASTER:
                with experts.lease(Plane.WEIGHT, [name]) as lease:
                    lease.page(*name).copy_(p)
                    lease.mark_dirty()
            for plane in planes:
                self._mark(experts, plane, name)
            manager.table.last_step[experts.page_ids(Plane.WEIGHT, [name])] = self.num_steps

    def _step_page(
        self,
        experts: PagedExperts,
        name: PageName,
        state: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        gradient: torch.Tensor | None,
        records: list[StepRecord],
    ) -> None:
        binding = self.bindings[experts]
        cut = experts.layout.matrix_numel(name[1])
        regions = [(slice(0, cut), binding.weights)]
        if binding.biases is not None:
            regions.append((slice(cut, state[0].numel()), binding.biases))
        for region, group in regions:
            p, m, v = (t[region] for t in state)
            if gradient is None:
                self.arithmetic.idle(p=p, m=m, v=v, record=records[group])
            else:
                self.arithmetic.step(p=p, m=m, v=v, g=gradient[region], record=records[group])

    # -- weights and state as seen from outside ----------------------------------------------------------------------

    @torch.no_grad()
    def sync_weights(self, experts: PagedExperts) -> None:
        """Sends every owner's weight pages to the other ranks of the group. A collective where state is sharded."""
        self._exchange(experts, Plane.WEIGHT, write_back=True)

    def _exchange(self, experts: PagedExperts, plane: Plane, *, write_back: bool) -> dict[PageName, torch.Tensor]:
        received: dict[PageName, torch.Tensor] = {}

        def page(name: PageName) -> torch.Tensor:
            return experts.manager.page_tensor(int(experts.page_ids(plane, [name])[0]))

        def write(name: PageName, part: torch.Tensor) -> None:
            if write_back:
                page(name).copy_(part)
            else:
                received[name] = part.clone()

        broadcast_owned(experts, self.shards, dtype=experts.pages.dtypes[plane], read=page, write=write)
        return received

    @torch.no_grad()
    def squared_parameter_norm(self, experts: PagedExperts) -> float:
        """Sum of squares of a module's fp32 parameters (masters where there are any). A collective where sharded."""
        total = torch.zeros((), dtype=torch.float64)
        for _, (page,) in self._owned_pages(experts, (master_plane(experts),)):
            total += torch.linalg.vector_norm(page, dtype=torch.float32).double().square().cpu()
        if self.shards.size > 1:
            total = total.to(experts.manager.arena.device)
            torch.distributed.all_reduce(total, group=self.shards.group)
        return float(total)

    @torch.no_grad()
    def dense(self, experts: PagedExperts, plane: Plane) -> dict[str, torch.Tensor]:
        """A plane's named tensors (copies) of all pages, whoever owns them. A collective where state is sharded."""
        if self.shards.size == 1 or plane is Plane.WEIGHT:
            return experts.dense(plane)
        pages = self._exchange(experts, plane, write_back=False)
        for name, (tensor,) in self._owned_pages(experts, (plane,)):
            pages[name] = tensor.clone()
        dtype = experts.pages.dtypes[plane]
        tensors = {t.name: torch.empty(t.shape, dtype=dtype) for t in experts.names.tensors()}
        experts.names.gather(pages, tensors)
        return tensors

    @torch.no_grad()
    def load_dense(self, experts: PagedExperts, plane: Plane, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies named tensors into the owned pages of a plane."""
        for name, (page,) in self._owned_pages(experts, (plane,)):
            experts.names.scatter(tensors, {name: page})
            self._mark(experts, plane, name)

    def set_num_steps(self, steps: int) -> None:
        """Sets the number of applied steps, as read from a checkpoint whose pages have all seen them."""
        self.num_steps = steps
        self.history = History()
        for experts in self.modules:
            ids = experts.manager.ids(experts.pages, Plane.WEIGHT, range(experts.num_experts))
            experts.manager.table.last_step[ids] = steps

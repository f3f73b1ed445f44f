"""Gradient pages between the last backward and the optimizer: scaled, reduced, measured and dropped.

Pages of experts without tokens are absent and count as zeros; nothing here makes one unless another rank has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.shards import PageName, PageShards, buckets
from megascale_omni.paging.planes import Plane


class ExpertGradients:
    """The gradient pages of some modules (those of one model chunk, or of a whole model)."""

    def __init__(self, modules: Sequence[PagedExperts]) -> None:
        self.modules = tuple(modules)

    def present(self, experts: PagedExperts) -> list[PageName]:
        """The pages (expert, slice) of a module that have a gradient, ascending."""
        return [(int(e), int(s)) for e, s in np.argwhere(experts.manager.present(experts.pages, Plane.GRADIENT))]

    def pages(self, experts: PagedExperts) -> Iterator[tuple[PageName, torch.Tensor]]:
        """Each present gradient page of a module with its elements (flat); leased while it is the current item."""
        for name in self.present(experts):
            with experts.lease(Plane.GRADIENT, [name]) as lease:
                yield name, lease.page(*name)

    def drop(self) -> None:
        """Forgets all gradients: a new step begins, nothing of the old one may be applied again."""
        for experts in self.modules:
            experts.manager.drop(experts.page_ids(Plane.GRADIENT, self.present(experts)))

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiplies every gradient, as stock multiplies its buffers."""
        for experts in self.modules:
            for _, page in self.pages(experts):
                page.mul_(factor)

    def reduce(self, group: dist.ProcessGroup) -> None:
        """Sums gradients over the ranks that hold the same experts. A collective of ``group``.

        A page that another rank has and this one does not is created with zeros: the union decides, so that all
        replicas see the same pages whoever got tokens.
        """
        if dist.get_world_size(group) == 1 or not self.modules:
            return
        union = self._union(group)
        offset = 0
        for experts in self.modules:
            count = experts.pages.entry.num_pages
            wanted = np.nonzero(union[offset : offset + count])[0]
            offset += count
            names = [divmod(int(i), experts.pages.entry.num_slices) for i in wanted]
            wanted_ids = experts.page_ids(Plane.GRADIENT, names)
            created = experts.manager.create_ids(experts.pages, Plane.GRADIENT, wanted_ids)
            with experts.manager.lease_ids(experts.pages, Plane.GRADIENT, created):
                for page_id in created.tolist():
                    experts.manager.page_tensor(page_id).zero_()
            self._reduce_pages(experts, names, group)

    def _union(self, group: dist.ProcessGroup) -> np.ndarray:
        masks = [e.manager.present(e.pages, Plane.GRADIENT).reshape(-1) for e in self.modules]
        device = self.modules[0].manager.arena.device
        mask = torch.from_numpy(np.concatenate(masks).astype(np.uint8)).to(device)
        dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=group)
        union: np.ndarray = mask.cpu().numpy()
        return union

    def _reduce_pages(self, experts: PagedExperts, names: list[PageName], group: dist.ProcessGroup) -> None:
        layout, dtype = experts.layout, experts.pages.dtypes[Plane.GRADIENT]

        def numel(name: PageName) -> int:
            return layout.page_numel(name[1])

        for run in buckets(names, numel):
            flat = experts.context.workspace.take("exchange", (sum(map(numel, run)),), dtype)
            parts = flat.split([numel(name) for name in run])
            with experts.lease(Plane.GRADIENT, run) as lease:
                for name, part in zip(run, parts, strict=True):
                    part.copy_(lease.page(*name))
                dist.all_reduce(flat, group=group)
                for name, part in zip(run, parts, strict=True):
                    lease.page(*name).copy_(part)
                lease.mark_dirty()

    def first_non_finite(self) -> str | None:
        """The first expert whose gradient has a NaN or infinity, by name; None where there is none."""
        for experts in self.modules:
            for (expert, slice_), page in self.pages(experts):
                if not math.isfinite(float(torch.linalg.vector_norm(page, dtype=torch.float32))):
                    bad = int((~torch.isfinite(page)).sum())
                    what = f"{bad} non-finite elements" if bad else "a norm that overflows fp32"
                    return f"{experts.path}, local expert {expert} (slice {slice_}): {what}"
        return None

    def squared_norm(self, shards: PageShards) -> float:
        """Sum of squares of the gradients that this rank owns under ``shards``: fp32 norms of pages, summed in fp64."""
        total = 0.0
        for experts in self.modules:
            owned = set(shards.owned(experts))
            for name, page in self.pages(experts):
                if name in owned:
                    total += float(torch.linalg.vector_norm(page, dtype=torch.float32)) ** 2
        return total

    def count_zeros(self, shards: PageShards) -> int:
        """Zero elements of this rank's gradients, absent pages counted as zeros, those it owns under ``shards``."""
        total = 0
        for experts in self.modules:
            owned = shards.owned(experts)
            total += sum(experts.layout.page_numel(slice_) for _, slice_ in owned)
            wanted = set(owned)
            for name, page in self.pages(experts):
                if name in wanted:
                    total -= int(torch.count_nonzero(page))
        return total

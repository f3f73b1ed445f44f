"""The experts' pages of one rank, counted exactly as a run would cut them; nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megascale_omni.paging.budget import ClassNeed, smallest_budget
from megascale_omni.paging.layout import PageLayout, SlotClass
from megascale_omni.paging.leases import PagedModule
from megascale_omni.paging.needs import class_needs
from megascale_omni.paging.planes import NUM_PLANES, PageNumbering, Plane
from megascale_omni.planner.models import ModelCard

MOST_PAGES = 2**31 - 1
"""Of all planes: a page is named by an int32."""


@dataclass(frozen=True)
class RankState:
    """One rank's modules. ``local_experts`` of each MoE layer are on it, of ``moe_layers`` layers."""

    modules: tuple[PagedModule, ...]

    @property
    def plane_bytes(self) -> dict[str, int]:
        """Bytes of all pages by plane."""
        result: dict[str, int] = {}
        for module in self.modules:
            for plane in module.dtypes:
                nbytes = module.entry.num_pages * module.slot_class(plane).nbytes
                result[plane.name.lower()] = result.get(plane.name.lower(), 0) + nbytes
        return result

    @property
    def num_pages(self) -> int:
        """Pages of a plane."""
        return sum(module.entry.num_pages for module in self.modules)

    @property
    def total_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(self.plane_bytes.values())

    @property
    def needs(self) -> dict[SlotClass, ClassNeed]:
        """What a budget is shared by."""
        return class_needs(self.modules)

    @property
    def smallest_budget(self) -> int:
        """Bytes below which the run refuses to start."""
        return smallest_budget(self.needs)


def rank_state(
    card: ModelCard, *, page_bytes: int, expert_parallel: int, pipeline_parallel: int, fp32_gradients: bool
) -> RankState:
    """Cuts the experts of the rank that has most.

    Raises:
        ValueError: experts or layers that cannot be divided, a page size that does not fit.
    """
    if card.num_experts % expert_parallel:
        raise ValueError(
            f"{card.num_experts} experts cannot be divided by --expert-parallel {expert_parallel}; change one of them"
        )
    if pipeline_parallel > card.moe_layers:
        raise ValueError(f"--pipeline-parallel {pipeline_parallel} is more than the {card.moe_layers} MoE layers")
    dtype = torch.bfloat16 if card.bf16 else torch.float32
    layout = PageLayout.for_page_bytes(card.expert, page_bytes=page_bytes, dtype=dtype)
    dtypes = {Plane.WEIGHT: dtype, Plane.GRADIENT: torch.float32 if fp32_gradients else dtype}
    if dtype is not torch.float32:
        dtypes[Plane.MASTER] = torch.float32
    pages = -(-card.moe_layers // pipeline_parallel) * (card.num_experts // expert_parallel) * layout.num_slices
    if pages * NUM_PLANES > MOST_PAGES:
        raise ValueError(
            f"{card.name}: {pages} pages a plane on one rank are more than there can be ({MOST_PAGES // NUM_PLANES}): "
            "use larger pages (--page-size), or more ranks"
        )
    dtypes |= {Plane.MOMENT1: torch.float32, Plane.MOMENT2: torch.float32}
    numbering, modules = PageNumbering(), []
    for layer in range(-(-card.moe_layers // pipeline_parallel)):
        entry = numbering.register(
            path=f"layer {layer}", num_experts=card.num_experts // expert_parallel, num_slices=layout.num_slices
        )
        modules.append(PagedModule(entry=entry, layout=layout, dtypes=dict(dtypes)))
    return RankState(tuple(modules))

"""What all paged modules of one run share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megascale_omni.checkpoint.scratch import DenseScratch
from megascale_omni.config import MegaScaleConfig
from megascale_omni.experts.backends import Backend, backend_for
from megascale_omni.experts.products import Products, products_for
from megascale_omni.experts.workspace import Workspace
from megascale_omni.groups.dispatch import GroupOptions
from megascale_omni.heat.observation import Observation
from megascale_omni.paging.available import paging_options
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.schedule import Schedule


@dataclass
class Export:
    """Where dense copies of experts are laid out for stock's checkpoints; in memory where ``folder`` is None."""

    folder: str | None = None

    def scratch(self) -> DenseScratch | None:
        """Room for the copies of one module and plane."""
        return None if self.folder is None else DenseScratch(self.folder)


@dataclass(frozen=True)
class Runtime:
    """Configuration, pages, scratch memory and schedule of one run; made when MegaScale is enabled."""

    config: MegaScaleConfig
    manager: ExpertManager
    workspace: Workspace
    products: Products
    backend: Backend
    observation: Observation
    export: Export
    path_numbers: list[str] = field(default_factory=list)

    @classmethod
    def create(cls, config: MegaScaleConfig) -> Runtime:
        """A runtime on the device that training runs on."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        workspace = Workspace(device)
        products = products_for(device=device, choice=config.compute.cpu_products, workspace=workspace)
        backend = backend_for(device=device, choice=config.compute.backend)
        options = paging_options(config.paging, device)
        manager = ExpertManager(device=device, schedule=Schedule(), options=options)
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        observation = Observation(manager, heat=config.heat, observe=config.observe, rank=rank, world=world)
        export = Export(config.paging.disk_path)
        return cls(config, manager, workspace, products, backend, observation, export)

    @property
    def schedule(self) -> Schedule:
        """The announced schedule."""
        return self.manager.schedule

    def group_options(self) -> GroupOptions:
        """How the groups dispatcher finds and serves groups."""
        options = self.config.distributed
        return GroupOptions(move=options.move, discovery=options.discovery, cache=options.group_cache)

    def provisional_path(self) -> str:
        """A unique path for a module that does not know its place in the model yet."""
        self.path_numbers.append(f"experts#{len(self.path_numbers)}")
        return self.path_numbers[-1]

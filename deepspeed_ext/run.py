"""What the paged experts of one engine share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist

from deepspeed_ext.config import Section
from deepspeed_ext.messages import said_in_json
from megascale_omni.bulk import bulk_for
from megascale_omni.experts.backends import Backend, backend_for
from megascale_omni.experts.products import Products, products_for
from megascale_omni.experts.workspace import Workspace
from megascale_omni.groups.channel import Channel
from megascale_omni.heat.observation import Observation
from megascale_omni.paging.available import paging_options
from megascale_omni.paging.layout import ExpertShape, PageLayout
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.ranks import all_or_none
from megascale_omni.schedule import Schedule


@dataclass(frozen=True)
class Ranks:
    """Where this rank's experts stand among the ranks.

    ``parallel`` is the expert-parallel group (each rank other experts), ``data`` the ranks with the same experts. None
    is a group of one.
    """

    parallel: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Ranks that divide the experts."""
        return 1 if self.parallel is None else dist.get_world_size(self.parallel)

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return 0 if self.parallel is None else dist.get_rank(self.parallel)

    @cached_property
    def channel(self) -> Channel:
        """What the ranks that divide the experts say to each other."""
        return Channel(self.parallel)

    def experts_of(self, rank: int, num_experts: int) -> range:
        """The experts (of ``num_experts`` in the model) that rank ``rank`` of the expert-parallel group owns."""
        return range(rank * num_experts // self.size, (rank + 1) * num_experts // self.size)

    def local(self, num_experts: int) -> range:
        """The experts that this rank owns."""
        return self.experts_of(self.rank, num_experts)


@dataclass
class Run:
    """Configuration, pages and scratch memory; made before the first experts are paged.

    While ``hidden``, state dicts of modules have no experts: a checkpoint keeps them in files of their own.
    """

    section: Section
    manager: ExpertManager
    workspace: Workspace
    products: Products
    backend: Backend
    observation: Observation
    ranks: Ranks = field(default_factory=Ranks)
    hidden: bool = False

    @classmethod
    def create(cls, section: Section, *, device: torch.device, ranks: Ranks) -> Run:
        """A run on ``device``."""
        workspace = Workspace(device)
        products = products_for(device=device, choice=section.config.compute.cpu_products, workspace=workspace)
        backend = backend_for(device=device, choice=section.config.compute.backend)
        options = paging_options(section.config.paging, device)
        bulk = bulk_for(device, choice=section.config.compute.backend)
        manager = ExpertManager(device=device, schedule=Schedule(), options=options, bulk=bulk)
        heat, observe = section.config.heat, section.config.observe
        observation = Observation(
            manager, heat=heat, observe=observe, rank=dist.get_rank(), world=dist.get_world_size()
        )
        return cls(section, manager, workspace, products, backend, observation, ranks)

    def close(self) -> None:
        """Ends traces and io threads, and removes the scratch file."""
        self.observation.close()
        self.manager.close()

    def layout(self, shape: ExpertShape, dtype: torch.dtype) -> PageLayout:
        """How experts of a shape are cut."""
        page_bytes = self.section.config.paging.page_size_bytes
        with said_in_json():
            return PageLayout.for_page_bytes(shape, page_bytes=page_bytes, dtype=dtype)

    def check_budget(self) -> None:
        """To be called when all modules and planes are known.

        Raises:
            ValueError: the device budget is too small; names the number that works.
        """
        with said_in_json():
            self.manager.check_budget()


def run_for(section: Section, *, expert_parallel_size: int | None = None) -> Run:
    """A run on the device and the ranks of this job. A collective.

    Raises:
        ValueError: a number of ranks that does not divide the job's; on every rank what one of them cannot do.
    """
    from deepspeed.accelerator import get_accelerator

    device = torch.device(get_accelerator().current_device_name())
    ranks = _ranks(expert_parallel_size or section.expert_parallel_size)
    made: list[Run] = []
    try:
        with said_in_json():
            all_or_none(lambda: made.append(Run.create(section, device=device, ranks=ranks)))
    except BaseException:
        for run in made:  # another rank has none
            run.close()
        raise
    return made[0]


def _ranks(size: int) -> Ranks:
    """The groups of this rank, made by DeepSpeed as it makes them for its own expert parallelism. A collective.

    Raises:
        ValueError: a number of ranks that does not divide the job's.
    """
    from deepspeed.utils import groups

    world = dist.get_world_size()
    if world % size:
        raise ValueError(
            f"megascale.expert_parallel_size={size} does not divide the {world} ranks of this job; choose a divisor"
        )
    if size == 1:
        return Ranks(data=groups._get_data_parallel_group())

    name = f"ep_size_{size}"
    if name not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(size)
    return Ranks(parallel=groups._get_expert_parallel_group(name), data=groups._get_expert_data_parallel_group(name))

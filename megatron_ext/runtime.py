"""What all paged modules of one run share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from megascale_omni.bulk import bulk_for
from megascale_omni.checkpoint.scratch import DenseScratch
from megascale_omni.config import MegaScaleConfig
from megascale_omni.experts.backends import Backend, backend_for
from megascale_omni.experts.overview import announce
from megascale_omni.experts.products import Products, products_for
from megascale_omni.experts.workspace import Workspace
from megascale_omni.groups.dispatch import GroupOptions
from megascale_omni.groups.guests import GuestHouse
from megascale_omni.heat.observation import Observation
from megascale_omni.paging.available import paging_options
from megascale_omni.paging.foresight import Foresight
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.schedule import Schedule
from megascale_omni.topology.levels import Topology
from megascale_omni.topology.placement import Placement
from megascale_omni.topology.routing import RoutingWriter
from megatron_ext.routing import EarlyRouter

logger = logging.getLogger(__name__)


@dataclass
class Export:
    """Where dense copies of experts are laid out for stock's checkpoints; in memory where ``folder`` is None."""

    folder: str | None = None
    _scratch: DenseScratch | None = None

    def scratch(self) -> DenseScratch | None:
        """Room for the copies of one module and plane."""
        if self.folder is not None and (self._scratch is None or self._scratch.folder != Path(self.folder)):
            self._scratch = DenseScratch(self.folder)
        return self._scratch

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor in host memory is such a copy, which nothing changes once it is made."""
        return self._scratch is not None and self._scratch.holds(tensor)

    def let_go(self) -> None:
        """Gives back the memory that reading such copies has taken; see :meth:`DenseScratch.let_go`."""
        if self._scratch is not None:
            self._scratch.let_go()


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
    guests: GuestHouse = field(default_factory=GuestHouse)
    topology: Topology | None = None
    placement: Placement | None = None
    routing: RoutingWriter | None = None
    early_router: EarlyRouter | None = None
    path_numbers: list[str] = field(default_factory=list)
    told: set[str] = field(default_factory=set)
    announces: bool = False

    @classmethod
    def create(cls, config: MegaScaleConfig, *, announce: bool = False) -> Runtime:
        """A runtime on the device that training runs on; ``announce``: see :meth:`announce`."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        workspace = Workspace(device)
        products = products_for(device=device, choice=config.compute.cpu_products, workspace=workspace)
        backend = backend_for(device=device, choice=config.compute.backend)
        options = paging_options(config.paging, device)
        bulk = bulk_for(device, choice=config.compute.backend)
        manager = ExpertManager(device=device, schedule=Schedule(), options=options, bulk=bulk)
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        observation = Observation(manager, heat=config.heat, observe=config.observe, rank=rank, world=world)
        if config.heat.frozen == "reroute":
            logger.warning(
                "tokens of frozen experts go to the next-best expert (--megascale-frozen reroute). This changes the "
                "mathematics"
            )
        where, which, record = config.distributed.topology, config.distributed.placement, config.observe.routing
        topology = None if where is None else Topology.from_file(where)
        if topology is not None and topology.num_ranks < world:
            raise ValueError(
                f"distributed.topology={where} has {topology.num_ranks} ranks, the run has {world}; add nodes to it, "
                "e.g. with `megascale topology recompile`"
            )
        return cls(
            config,
            manager,
            workspace,
            products,
            backend,
            observation,
            export=Export(config.paging.disk_path),
            topology=topology,
            placement=None if which is None else Placement.from_file(which),
            routing=None if record is None else RoutingWriter(record, rank=rank, world=world),
            early_router=EarlyRouter(Foresight(manager)) if config.paging.prefetch == "early-router" else None,
            announces=announce,
        )

    @property
    def schedule(self) -> Schedule:
        """The announced schedule."""
        return self.manager.schedule

    def close(self) -> None:
        """Ends what is being written."""
        self.observation.close()
        if self.routing is not None:
            self.routing.close()

    def group_options(self, ranks: Sequence[int]) -> GroupOptions:
        """How the groups dispatcher finds and serves groups among ``ranks`` (of the job).

        Raises:
            ValueError: the topology does not have such a rank.
        """
        options = self.config.distributed
        links = None if self.topology is None else self.topology.link_costs(ranks)
        return GroupOptions(
            move=options.move,
            discovery=options.discovery,
            links=links,
            cache=options.group_cache,
            grad_wire=options.grad_wire,
        )

    def warn_once(self, message: str) -> None:
        """Says on the first rank, once a run, what an option cannot do on these ranks."""
        if message not in self.told and not (dist.is_initialized() and dist.get_rank()):
            logger.warning("%s", message)
        self.told.add(message)

    def announce(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Prints on the first rank, once a run, what of the model is in pages, if that is asked for."""
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if self.announces and rank == 0 and "announced" not in self.told and announce(chunks, rank=rank, world=world):
            self.told.add("announced")

    def provisional_path(self) -> str:
        """A unique path for a module that does not know its place in the model yet."""
        self.path_numbers.append(f"experts#{len(self.path_numbers)}")
        return self.path_numbers[-1]

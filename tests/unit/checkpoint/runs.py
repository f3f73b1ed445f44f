"""Small runs of paged experts and a dense tensor, on several ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from megascale_omni.checkpoint.boxes import Box
from megascale_omni.checkpoint.checkpointer import Checkpointer, RankState
from megascale_omni.checkpoint.dense import TensorPiece, flat_pieces, whole_piece
from megascale_omni.checkpoint.pages import ExpertsPiece
from megascale_omni.experts.activation import Activation
from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.shards import PageShards
from megascale_omni.optimizer.arithmetic import TorchAdam, TorchAdamW
from megascale_omni.optimizer.paged_adam import GroupBinding, PagedAdam
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.planes import Plane
from tests.unit.experts.paged import CPU, SWIGLU, small_experts

T = TypeVar("T")
EXPERTS = 4
MODULES = ("layers.0.experts", "layers.1.experts")
STATE = (Plane.WEIGHT, Plane.MASTER, Plane.MOMENT1, Plane.MOMENT2)
TIMEOUT_SECONDS = 30.0


class ThreadRanks:
    """Ranks that are threads. One object for all of them; :meth:`of` gives a rank's own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_SECONDS)
        self.values: list[Any] = [None] * size

    def of(self, rank: int) -> _OneRank:
        return _OneRank(self, rank)

    def run(self, function: Callable[[_OneRank], T]) -> list[T]:
        """``function`` on every rank; the first error of any is raised."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                results[rank] = function(self.of(rank))
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        for error in real or errors:
            raise error
        return results


@dataclass
class _OneRank:
    all_ranks: ThreadRanks
    rank: int

    @property
    def size(self) -> int:
        return self.all_ranks.size

    def gather(self, value: T) -> list[T]:
        self.all_ranks.values[self.rank] = value
        self.all_ranks.barrier.wait()
        found = list(self.all_ranks.values)
        self.all_ranks.barrier.wait()
        return found

    def all(self, value: bool) -> bool:
        return all(self.gather(value))


@dataclass(frozen=True)
class Layout:
    """``ep`` groups of experts, each on ``world / ep`` ranks; ``pp`` stages of modules; rows of neurons a page."""

    world: int = 1
    ep: int = 1
    pp: int = 1
    rows: int = 16


class Run:
    """One rank's part of a model of two modules of four experts and two dense tensors, at a layout."""

    def __init__(
        self,
        rank: int,
        layout: Layout,
        *,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        activation: Activation = SWIGLU,
        decoupled: bool = True,
        max_lag: int = 100,
        manager: ExpertManager | None = None,
        seed: int = 7,
        frozen: Collection[str] = (),
    ) -> None:
        self.layout, self.rank = layout, rank
        stage_size = layout.world // layout.pp
        self.stage, in_stage = divmod(rank, stage_size)
        self.ep_rank, self.replica = in_stage % layout.ep, in_stage // layout.ep
        self.manager = manager or ExpertManager(device=CPU, poison=True)
        self.modules: dict[str, PagedExperts] = {}
        per_stage = len(MODULES) // layout.pp
        for path in MODULES[self.stage * per_stage : (self.stage + 1) * per_stage]:
            experts = small_experts(
                activation,
                num_experts=EXPERTS // layout.ep,
                rows=layout.rows,
                bias=bias,
                dtype=dtype,
                gradient_dtype=torch.float32,
                manager=self.manager,
            )
            self.modules[path] = experts
            self._initialise(path, experts, seed)
            if path in frozen:
                experts.requires_grad_(False)
                continue
            if dtype is not torch.float32:
                self.manager.set_plane_dtype(experts.pages, Plane.MASTER, torch.float32)
            for plane in (Plane.MOMENT1, Plane.MOMENT2):
                self.manager.set_plane_dtype(experts.pages, plane, torch.float32)
        groups = [_group(0.1), _group(0.0)]
        self.adam = PagedAdam(
            [(m, GroupBinding(0, 1 if bias else None)) for path, m in self.modules.items() if path not in frozen],
            groups=groups,
            arithmetic=TorchAdamW() if decoupled else TorchAdam(),
            shards=PageShards(),
            max_lag=max_lag,
        )
        generator = torch.Generator().manual_seed(seed)
        self.dense = torch.randn(6, 5, generator=generator)
        self.flat = torch.randn(7, 3, generator=generator)

    def _initialise(self, path: str, experts: PagedExperts, seed: int) -> None:
        for local in range(experts.num_experts):
            number = MODULES.index(path) * EXPERTS + self.first + local
            generator = torch.Generator().manual_seed(seed * 1000 + number)
            dtype = experts.pages.dtypes[Plane.WEIGHT]
            values = {
                tensor.name: torch.randn(tensor.shape, generator=generator).mul_(0.2).to(dtype)
                for tensor in dict.fromkeys(item.tensor for item in experts.names.of_expert(local))
            }
            experts.load_dense(values)

    @property
    def first(self) -> int:
        return self.ep_rank * (EXPERTS // self.layout.ep)

    def step(self, number: int, experts: dict[str, list[int]]) -> None:
        """One step in which ``experts`` (global, by module) get gradients; the same numbers in any layout."""
        for group in self.adam.param_groups:
            group["lr"] = 1e-2 / number
        for path, module in self.modules.items():
            if not module.trainable:
                continue
            chosen = [e - self.first for e in experts[path] if 0 <= e - self.first < module.num_experts]
            for local in chosen:
                generator = torch.Generator().manual_seed(number * 100 + self.first + local + 50 * MODULES.index(path))
                values = {
                    tensor.name: torch.randn(tensor.shape, generator=generator)
                    for tensor in dict.fromkeys(item.tensor for item in module.names.of_expert(local))
                }
                names = [(local, s) for s in range(module.layout.num_slices)]
                module.manager.create_ids(module.pages, Plane.GRADIENT, module.page_ids(Plane.GRADIENT, names))
                with module.lease(Plane.GRADIENT, names) as lease:
                    lease.mark_dirty()
                    module.names.scatter(values, {name: lease.page(*name) for name in names})
        self.adam.step()
        ExpertGradients(list(self.modules.values())).drop()
        self.dense.mul_(0.5).add_(number)
        self.flat.mul_(0.25).sub_(number)

    def state(self) -> RankState:
        stage_size = self.layout.world // self.layout.pp
        tensors = [whole_piece("dense", self.dense, writes=self.rank == 0)]
        # Sharded as a distributed optimizer would: a range of the flattened tensor a rank, of all ranks.
        if self.layout.world == 1:
            tensors.append(TensorPiece("flat", (7, 3), Box((0, 0), (7, 3)), self.flat))
        else:
            start, stop = (r * 21 // self.layout.world for r in (self.rank, self.rank + 1))
            part = self.flat.view(-1)[start:stop]
            box = Box((0, 0), (7, 3))
            tensors += flat_pieces("flat", (7, 3), part, start=start, within=box, global_shape=(7, 3))
        share = PageShards(rank=self.replica, size=stage_size // self.layout.ep)
        pieces = [ExpertsPiece(path, m, self.first, EXPERTS, share) for path, m in self.modules.items()]
        return RankState(tensors, pieces, self.adam)

    def weights(self) -> dict[str, torch.Tensor]:
        """Every tensor of every plane, caught up, by module, plane, global expert and name."""
        found = {}
        for path, module in self.modules.items():
            for plane in STATE:
                if plane not in module.pages.dtypes:
                    continue
                for name, tensor in module.dense(plane).items():
                    _, local, rest = name.split(".", 2)
                    found[f"{path} {plane.name} {self.first + int(local)} {rest}"] = tensor
        return found

    def lags(self) -> set[int]:
        """Steps that pages are behind."""
        ids = [m.page_ids(Plane.WEIGHT, [(e, 0)])[0] for m in self.modules.values() for e in range(m.num_experts)]
        return {self.adam.num_steps - int(self.manager.table.last_step[i]) for i in ids}


def _group(weight_decay: float) -> dict[str, Any]:
    return {"lr": 1e-2, "weight_decay": weight_decay, "betas": (0.9, 0.99), "eps": 1e-8, "params": []}


def load_newest(checkpoints: Checkpointer, run: Run, *, tag: str | None = None, with_optimizer: bool = True) -> None:
    """Fills ``run`` from the newest checkpoint, or the one named ``tag``, which must be there."""
    opened = checkpoints.open(tag)
    assert opened is not None
    checkpoints.load(opened, run.state(), with_optimizer=with_optimizer)


def touched(number: int) -> dict[str, list[int]]:
    """Experts that get gradients at step ``number``: some often, one of each module never."""
    return {MODULES[0]: [number % 3], MODULES[1]: [0, 1] if number % 4 == 0 else [2]}

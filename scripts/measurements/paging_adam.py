"""Deferred Adam on pages beside the dense optimizer on whole tensors: the same steps for both, compared bit by bit.

Experts are active at random; learning rate, decay and betas change at every step, and biases have a group of their own.
Gradients are written straight into gradient pages, the same ones the dense optimizer gets.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.shards import PageShards
from megascale_omni.experts.workspace import Workspace
from megascale_omni.optimizer.arithmetic import arithmetic_for
from megascale_omni.optimizer.paged_adam import GroupBinding, PagedAdam
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.manager import ExpertManager, PagingOptions
from megascale_omni.paging.planes import Plane
from scripts.measurements.paging_model import CPU, Task, batches_of, random_experts

Tensors = dict[str, torch.Tensor]
Settings = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One kind of optimizer over one kind of page; under the smallest budget there is, or all pages resident."""

    decoupled: bool = True
    fused: bool = False
    dtype: torch.dtype = torch.float32
    bias: bool = True
    max_lag: int = 100
    paged: bool = True
    in_host: bool = False  # host memory behind the smallest budget, and pages stepped in it

    @property
    def task(self) -> Task:
        """The experts that are stepped."""
        return Task(modules=1, experts=8, hidden=24, dtype=self.dtype, bias=self.bias, batch_bytes=1)


CASES = {
    "AdamW": Case(),
    "AdamW bf16": Case(dtype=torch.bfloat16),
    "AdamW fused": Case(fused=True, bias=False),
    "AdamW bf16 lag 7": Case(dtype=torch.bfloat16, max_lag=7, paged=False),
    "AdamW lag 0": Case(max_lag=0, paged=False),
    "L2": Case(decoupled=False),
    "L2 bf16 lag 7": Case(decoupled=False, dtype=torch.bfloat16, max_lag=7),
    "L2 bf16 in host memory": Case(decoupled=False, dtype=torch.bfloat16, max_lag=7, in_host=True),
    "L2 lag 0": Case(decoupled=False, max_lag=0, bias=False, paged=False),
}


def schedule(step: int) -> Settings:
    """Settings of the group of weights and of that of biases, others at every step."""
    lr = 3e-3 * min(1.0, step / 10) * 0.995**step
    weights = {
        "lr": lr,
        "weight_decay": (0.1, 0.1, 0.0, 0.013)[step // 5 % 4],
        "betas": ((0.9, 0.95)[step // 7 % 2], (0.999, 0.95)[step // 11 % 2]),
        "eps": (1e-8, 1e-5)[step // 13 % 2],
    }
    return [weights, {**weights, "lr": 2 * lr, "weight_decay": 0.0 if step % 9 else 0.01}]


class Dense:
    """The dense optimizer on the fp32 tensors of all experts, as Megatron runs it."""

    def __init__(self, experts: PagedExperts, case: Case) -> None:
        self.dtype = case.dtype
        self.params = {n: torch.nn.Parameter(t.float().clone()) for n, t in experts.dense().items()}
        weights = [p for n, p in self.params.items() if not n.endswith("bias")]
        biases = [p for n, p in self.params.items() if n.endswith("bias")]
        kind = torch.optim.AdamW if case.decoupled else torch.optim.Adam
        groups = [{"params": params} for params in (weights, biases) if params]
        self.optimizer = kind(groups, lr=1.0, foreach=not case.fused, fused=case.fused)

    def step(self, gradients: Tensors, settings: Settings, clip: float | None) -> None:
        """A step; tensors without a gradient have one of zeros."""
        for group, values in zip(self.optimizer.param_groups, settings, strict=False):
            group.update(values)
        for name, parameter in self.params.items():
            gradient = gradients.get(name)
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient.clone()
            if clip is not None:
                parameter.grad.mul_(clip)
        self.optimizer.step()

    def plane(self, plane: Plane) -> Tensors:
        """What the pages of a plane should hold."""
        if plane in (Plane.WEIGHT, Plane.MASTER):
            dtype = self.dtype if plane is Plane.WEIGHT else torch.float32
            return {name: parameter.detach().to(dtype) for name, parameter in self.params.items()}
        key, states = "exp_avg" if plane is Plane.MOMENT1 else "exp_avg_sq", self.optimizer.state
        return {n: states[p][key] if p in states else torch.zeros_like(p) for n, p in self.params.items()}


@dataclass
class Pair:
    """Paged experts with their optimizer, and the dense one beside them."""

    case: Case
    folder: Path
    seed: int = 0
    steps: int = 0
    manager: ExpertManager = field(init=False)
    experts: PagedExperts = field(init=False)
    groups: Settings = field(init=False)
    adam: PagedAdam = field(init=False)
    dense: Dense = field(init=False)

    def __post_init__(self) -> None:
        options = PagingOptions()
        if self.case.paged:  # no bytes at all: raised to the floors
            host = Budget(fraction=1.0 if self.case.in_host else 0.0)
            options = PagingOptions(Budget(nbytes=0), host, disk_path=self.folder, checksum="crc32")
        self.manager = ExpertManager(device=CPU, options=options, poison=True)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.experts = random_experts(
            self.manager, "experts", self.case.task, workspace=Workspace(CPU), generator=self.generator
        )
        self.dense = Dense(self.experts, self.case)
        self.groups = schedule(1)
        self.adam = self.new_optimizer()

    def new_optimizer(self) -> PagedAdam:
        """An optimizer that has made no step."""
        return PagedAdam(
            [(self.experts, GroupBinding(weights=0, biases=1 if self.case.bias else None))],
            groups=self.groups,
            arithmetic=arithmetic_for(decoupled=self.case.decoupled, fused=self.case.fused),
            shards=PageShards(),
            max_lag=self.case.max_lag,
            in_host=self.case.in_host,
        )

    @property
    def planes(self) -> list[Plane]:
        """All planes but gradients."""
        return [plane for plane in self.experts.pages.dtypes if plane is not Plane.GRADIENT]

    def step(self, active: Sequence[int], *, clip: float | None = None, settings: Settings | None = None) -> None:
        """A step of both, in which the experts ``active`` have a gradient."""
        self.steps += 1
        self.manager.schedule.begin_step(self.steps)
        gradients: Tensors = {}
        for expert in active:
            for part in self.experts.names.of_expert(expert):
                if part.tensor.name not in gradients:
                    values, sizes = torch.randn(2, *part.tensor.shape, generator=self.generator)
                    gradients[part.tensor.name] = values * torch.exp(2 * sizes)
            self.manager.create(self.experts.pages, Plane.GRADIENT, [expert])
            with self.manager.lease(self.experts.pages, Plane.GRADIENT, [expert]) as lease:
                slices = range(self.experts.layout.num_slices)
                self.experts.names.scatter(gradients, {(expert, s): lease.page(expert, s) for s in slices})
                lease.mark_dirty()
        settings = schedule(self.steps) if settings is None else settings
        for group, values in zip(self.groups, settings, strict=True):
            group.update(values)
        self.adam.step(clip_coefficient=clip)
        self.dense.step(gradients, settings, clip)
        ExpertGradients([self.experts]).drop()

    @property
    def last_steps(self) -> list[int]:
        """The step that every weight page has seen."""
        ids = self.manager.ids(self.experts.pages, Plane.WEIGHT, range(self.experts.num_experts))
        steps: list[int] = self.manager.table.last_step[ids].tolist()
        return steps

    def differences(self) -> list[str]:
        """Names of tensors whose bits are not those of the dense optimizer; reads, and so catches up, everything."""
        found = []
        for plane in self.planes:
            mine, theirs = self.adam.tensors.dense(self.experts, plane), self.dense.plane(plane)
            found += [f"{plane.name.lower()} of {name}" for name in differing(mine, theirs)]
        self.manager.check_integrity()
        return found


def differing(mine: Tensors, theirs: Tensors) -> list[str]:
    """Names of tensors that do not have the same bits."""
    assert mine.keys() == theirs.keys()
    return [name for name in theirs if not mine[name].view(torch.uint8).equal(theirs[name].view(torch.uint8))]


@contextmanager
def pair_of(case: Case, folder: Path, *, seed: int = 0) -> Iterator[Pair]:
    """A pair, closed at the end."""
    with batches_of(case.task):
        pair = Pair(case, folder, seed)
        try:
            yield pair
        finally:
            pair.manager.close()


@dataclass(frozen=True)
class Compared:
    """What a run of both came to: tensors that differ, the largest lag, the records kept at most, pages loaded."""

    differences: tuple[str, ...]
    lag: int
    records: int
    loaded: int


def compare(case: Case, folder: Path, *, steps: int, seed: int, active: float = 0.05) -> Compared:
    """Steps both, with experts active at a share of the steps; compares at random steps and at the end."""
    drawn, lag, records = random.Random(seed), 0, 0
    with pair_of(case, folder, seed=seed) as pair:
        differences: list[str] = []
        for _ in range(steps):
            chosen = [expert for expert in range(pair.experts.num_experts) if drawn.random() < active]
            pair.step(chosen, clip=drawn.choice([None, 0.7]))
            lag = max(lag, pair.steps - min(pair.last_steps))
            records = max(records, len(pair.adam.history))
            if drawn.random() < 0.01:
                differences += pair.differences()
        differences += pair.differences()
        return Compared(tuple(differences), lag, records, pair.manager.stats().get("pages_loaded", 0))

"""A small model of paged experts alone, trained on a CPU: what residency, faults and prefetch must not change.

Modules of experts follow each other with residual connections; routing is drawn for each step, so that some experts are
active, then not, then active again. A step is all that a real one is: micro-batches, backward, scaling, norm, clipping,
Adam with changing settings; between steps there are evaluations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch.utils.checkpoint import checkpoint

from megascale_omni.experts.activation import Activation
from megascale_omni.experts.completion import LastGradients
from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.products import products_for
from megascale_omni.experts.shards import PageShards
from megascale_omni.experts.workspace import Workspace
from megascale_omni.optimizer.arithmetic import arithmetic_for
from megascale_omni.optimizer.paged_adam import GroupBinding, PagedAdam
from megascale_omni.paging.budget import smallest_budget
from megascale_omni.paging.copies import Copier
from megascale_omni.paging.layout import ExpertShape, PageLayout
from megascale_omni.paging.manager import ExpertManager, PagingOptions
from megascale_omni.paging.memory import MemoryProbe
from megascale_omni.paging.mover import Mover
from megascale_omni.paging.needs import class_needs
from megascale_omni.paging.planes import Plane

CPU = torch.device("cpu")
ALL = PagingOptions()
"""Everything stays in the device arena."""


@dataclass(frozen=True)
class Task:
    """What is trained, and how. Everything random follows from ``seed``."""

    seed: int = 0
    steps: int = 4
    micro_batches: int = 2
    modules: int = 2
    experts: int = 6
    active: int = 3  # experts of a module that get tokens in a micro-batch
    tokens: int = 24
    hidden: int = 32
    ffn: int = 40
    rows: int = 16  # neurons of a page
    bias: bool = True
    dtype: torch.dtype = torch.float32
    decoupled: bool = True
    max_lag: int = 100
    clip: float = 0.5  # largest norm of all gradients; 0: none, and pages are stepped in the backward
    in_backward: bool = True  # gradients are completed in the last backward
    in_host: bool = False  # pages whose moments lie in host memory are stepped there
    recompute: bool = False
    evaluate: bool = True
    blas: bool = True  # products by BLAS; by what suits the processor otherwise
    batch_bytes: int = 16384  # a few pages
    device: str = "cpu"
    kernels: bool = False  # on an accelerator, pages are stepped by a kernel

    @property
    def layout(self) -> PageLayout:
        """The cut of every module's experts."""
        return PageLayout(ExpertShape(hidden=self.hidden, ffn=self.ffn, gated=True, bias=self.bias), self.rows)


@dataclass
class Trained:
    """What came out: losses in order, all tensors by name, and what the pages did on the way."""

    losses: list[float] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def differs_from(self, other: Trained) -> list[str]:
        """Names of what does not have the same bits."""
        names = [] if self.losses == other.losses else ["losses"]
        for name in self.tensors.keys() | other.tensors.keys():
            mine, theirs = self.tensors.get(name), other.tensors.get(name)
            if mine is None or theirs is None or not mine.view(torch.uint8).equal(theirs.view(torch.uint8)):
                names.append(name)
        return sorted(names)


def random_experts(
    manager: ExpertManager, path: str, task: Task, *, workspace: Workspace, generator: torch.Generator
) -> PagedExperts:
    """A module of a task with random weights and all planes of a training."""
    device = torch.device(task.device)
    dtypes = {Plane.WEIGHT: task.dtype, Plane.GRADIENT: torch.float32}
    if task.dtype is not torch.float32:
        dtypes[Plane.MASTER] = torch.float32
    experts = PagedExperts(
        manager=manager,
        path=path,
        layout=task.layout,
        num_experts=task.experts,
        dtypes={**dtypes, Plane.MOMENT1: torch.float32, Plane.MOMENT2: torch.float32},
        activation=Activation("silu", gated=True),
        style="sequential",
        products=products_for(device=device, choice="blas" if task.blas else "auto", workspace=workspace),
        workspace=workspace,
    )
    for expert in range(task.experts):
        shapes = {part.tensor.name: part.tensor.shape for part in experts.names.of_expert(expert)}
        values = {n: torch.randn(s, generator=generator) / s[-1] ** 0.5 for n, s in shapes.items()}
        experts.initialise(expert, {name: value.to(device, task.dtype) for name, value in values.items()})
    return experts


class Model:
    """The modules of a task with their optimizer, on one manager."""

    def __init__(
        self,
        task: Task,
        options: PagingOptions,
        mover: Mover | None = None,
        *,
        copier: Copier | None = None,
        memory: MemoryProbe | None = None,
        poison: bool = True,
    ) -> None:
        self.task = task
        self.device = torch.device(task.device)
        self.manager = ExpertManager(
            device=self.device, options=options, mover=mover, copier=copier, memory=memory, poison=poison
        )
        workspace = Workspace(self.device)
        generator = torch.Generator().manual_seed(task.seed)
        self.modules = [
            random_experts(self.manager, f"layers.{number}.experts", task, workspace=workspace, generator=generator)
            for number in range(task.modules)
        ]
        self.manager.check_budget()
        self.groups = [{"lr": 0.0, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8} for _ in range(2)]
        self.adam = PagedAdam(
            [(experts, GroupBinding(weights=0, biases=1 if task.bias else None)) for experts in self.modules],
            groups=self.groups,
            arithmetic=arithmetic_for(decoupled=task.decoupled, fused=False, device=self.device, kernels=task.kernels),
            shards=PageShards(),
            max_lag=task.max_lag,
            in_host=task.in_host,
        )
        self.gradients = ExpertGradients(self.modules)
        if task.in_backward:
            last = LastGradients(self.gradients, scale=1.0 / task.micro_batches, backwards=lambda: task.micro_batches)
            last.stepper = None if task.clip else self.adam

    def forward(self, generator: torch.Generator) -> torch.Tensor:
        """The loss of a batch."""
        task, device = self.task, self.device
        x = torch.randn(task.tokens, task.hidden, generator=generator).to(device, task.dtype)
        target = torch.randn(task.tokens, task.hidden, generator=generator).to(device)
        for experts in self.modules:
            chosen = torch.randperm(task.experts, generator=generator)[: task.active]
            routed = chosen[torch.randint(task.active, (task.tokens,), generator=generator)]
            counts = torch.bincount(routed, minlength=task.experts).tolist()
            probs = torch.rand(task.tokens, generator=generator).to(device, task.dtype)
            x = x[torch.randperm(task.tokens, generator=generator).to(device)]
            if task.recompute and torch.is_grad_enabled():
                y = checkpoint(experts, x, counts, probs, use_reentrant=False)
            else:
                y = experts(x, counts, probs)
            x = x + y
        return (x.float() - target).square().mean()

    def step(self, number: int, found: Trained) -> None:
        """A training step, and an evaluation after every other one."""
        task, generator = self.task, torch.Generator().manual_seed(1000 * self.task.seed + number)
        self.manager.schedule.begin_step(number)
        self.gradients.drop()
        self.groups[0].update(lr=1e-2 / number, weight_decay=0.1 if number % 3 else 0.0)
        self.groups[1].update(lr=2e-2 / number, betas=(0.9, 0.95 - 0.01 * (number % 2)))
        for _ in range(task.micro_batches):
            loss = self.forward(generator)
            found.losses.append(float(loss.detach()))
            loss.backward()  # type: ignore[no-untyped-call]
        self.gradients.finish(scale=1.0 / task.micro_batches)
        squares, zeros = self.gradients.squares(PageShards()), self.gradients.zeros(PageShards())
        found.losses += [squares, float(zeros)]
        norm = squares**0.5
        self.adam.step(clip_coefficient=task.clip / norm if 0 < task.clip < norm else None)
        if task.evaluate and number % 2 == 0:
            with torch.no_grad():
                found.losses.append(float(self.forward(generator)))

    def export(self, found: Trained) -> None:
        """All tensors of all planes but gradients, caught up, as an export would have them."""
        for experts in self.modules:
            for plane in sorted(experts.pages.dtypes):
                if plane is not Plane.GRADIENT:
                    for name, tensor in self.adam.tensors.dense(experts, plane).items():
                        found.tensors[f"{experts.path}.{name}.{plane.name.lower()}"] = tensor.cpu()

    @property
    def smallest_budget(self) -> int:
        """Bytes without which the model does not train."""
        return smallest_budget(class_needs(self.manager.modules))


@contextmanager
def batches_of(task: Task) -> Iterator[None]:
    """While it lasts, batches are as small as the task says, so that small models have many."""
    with mock.patch("megascale_omni.paging.batches.BATCH_BYTES", task.batch_bytes):
        yield


def train(
    task: Task,
    options: PagingOptions = ALL,
    *,
    mover: Mover | None = None,
    copier: Copier | None = None,
    check: bool = False,
) -> Trained:
    """Trains and exports; with ``check`` the page table is counted after every step."""
    found = Trained()
    with batches_of(task):
        model = Model(task, options, mover, copier=copier)
        try:
            for number in range(1, task.steps + 1):
                model.step(number, found)
                if check:
                    model.manager.check_integrity()
            model.export(found)
            if check:
                model.manager.check_integrity()
            found.counts = model.manager.stats()
        finally:
            model.manager.close()
    return found


def smallest_budget_of(task: Task) -> int:
    """Bytes of the smallest device budget that trains the task, as the error for a smaller one names it."""
    with batches_of(task):
        return Model(task, ALL).smallest_budget

"""The step-by-step proof: at every step both sides begin with stock's weights, moments and batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from scripts.deepspeed_runs.models import Size, build, configuration
from scripts.deepspeed_runs.state import KINDS, MOMENT1, MOMENT2, WEIGHT, State, read_state, write_state

MUTANT_FACTOR = 1.001
BETA1 = 0.9


@dataclass(frozen=True)
class Case:
    """One training set-up: a model, a DeepSpeed configuration, and the section that megascale's side adds to it."""

    family: str = "mixtral"
    stage: int = 0
    bf16: bool = False
    accumulation: int = 1
    clipping: float = 0.5
    steps: int = 6
    sequences: int = 2
    length: int = 12
    size: Size = Size()  # noqa: RUF009 - frozen
    experts_implementation: str | None = None
    section: dict[str, object] = field(default_factory=dict)
    extra: dict[str, object] = field(default_factory=dict)
    seed: int = 1

    def config(self, *, megascale: bool) -> dict[str, Any]:
        """The DeepSpeed configuration of one side."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.sequences,
            "gradient_accumulation_steps": self.accumulation,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 3e-3, "betas": [BETA1, 0.95], "eps": 1e-5, "weight_decay": 0.1, "torch_adam": True},
            },
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 3e-3}},
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 64},
            "gradient_clipping": self.clipping,
            "bf16": {"enabled": self.bf16},
            "steps_per_print": None,
            **self.extra,
        }
        if megascale:
            config["megascale"] = {"enabled": True, **self.section}
        return config


@dataclass
class Deviations:
    """The worst of each kind over all steps: a share of stock's, and where."""

    worst: dict[str, float] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    experts_hit: list[list[int]] = field(default_factory=list)
    """By step: the experts that tokens of this rank were sent to, in the first layer."""
    page_stats: dict[str, int] = field(default_factory=dict)
    """Counters of the pages at the end, and bytes of pages: resident, and all."""

    def note(self, kind: str, value: float, where: str) -> None:
        """Keeps the value if it is the worst of its kind; what is no number is worst of all."""
        if kind not in self.worst or not value <= self.worst[kind]:
            self.worst[kind], self.where[kind] = value, where


class Side:
    """One engine, fed with the same batches as the other."""

    def __init__(self, case: Case, model: torch.nn.Module, *, megascale: bool) -> None:
        import deepspeed

        self.case = case
        self.engine, *_ = deepspeed.initialize(model=model, config=case.config(megascale=megascale))
        self.routing: list[torch.Tensor] = []
        for name, module in self.engine.module.named_modules():
            if name.endswith(".experts"):
                module.register_forward_pre_hook(self._note_routing, with_kwargs=True)

    def _note_routing(self, module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        found = [v for v in (*inputs, *named.values()) if isinstance(v, torch.Tensor) and not v.is_floating_point()]
        self.routing.append(found[0].detach().clone())

    def step(self, batches: list[torch.Tensor]) -> tuple[float, float | None]:
        """One optimizer step over micro-batches: mean loss of this rank, and the gradient norm if there is one."""
        self.routing.clear()
        losses = []
        for batch in batches:
            loss = self.engine(input_ids=batch, labels=batch).loss
            losses.append(float(loss.detach()))
            self.engine.backward(loss)
            self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return sum(losses) / len(losses), None if norm is None else float(norm)


def prove(rank: int, world: int, *, case: Case, mutate: bool = False, synchronise: bool = True) -> Deviations:
    """Deviations of megascale's side from stock's; with ``mutate`` one expert's gradient is wrong by a thousandth.

    Without ``synchronise`` both run on in their own state. A collective of all ranks.
    """
    model = _model(case, case.experts_implementation)
    stock = Side(case, copy.deepcopy(model), megascale=False)
    paged = Side(case, model, megascale=True)
    with _mutant(paged.engine) if mutate else _nothing():
        found = _all_steps(stock, paged, rank, world, synchronise=synchronise)
    found.page_stats = page_stats(paged.engine)
    stock.engine.destroy()
    paged.engine.destroy()
    return found


def prove_control(rank: int, world: int, *, case: Case) -> Deviations:
    """Deviations of stock with eager experts from stock with grouped ones: what the order of sums alone does."""
    stock = Side(case, _model(case, "grouped_mm"), megascale=False)
    other = Side(case, _model(case, "eager"), megascale=False)
    found = _all_steps(stock, other, rank, world, synchronise=True)
    stock.engine.destroy()
    other.engine.destroy()
    return found


def _model(case: Case, experts_implementation: str | None) -> torch.nn.Module:
    return build(configuration(case.family, case.size, experts_implementation=experts_implementation), seed=7)


def _all_steps(stock: Side, other: Side, rank: int, world: int, *, synchronise: bool) -> Deviations:
    found, case = Deviations(), stock.case
    before = read_state(stock.engine)
    for step in range(case.steps):
        if step and synchronise:
            write_state(other.engine, before)
        before = _one_step(stock, other, found, before, batches_of(case, rank, world, step), step)
    return found


def page_stats(engine: Any) -> dict[str, int]:  # noqa: ANN401
    """Counters of an engine's pages, and their bytes: resident now, and all that there could be."""
    manager = engine.run.manager
    total = sum(m.slot_class(plane).nbytes * m.entry.num_pages for m in manager.modules for plane in m.dtypes)
    resident = sum(manager.resident_bytes().values())
    return {**manager.stats(), "resident_bytes": resident, "all_bytes": total}


def _one_step(
    stock: Side, paged: Side, found: Deviations, before: State, batches: list[torch.Tensor], step: int
) -> State:
    (loss, norm), (loss_here, norm_here) = stock.step(batches), paged.step(batches)
    found.losses.append(loss_here)
    found.norms.append(norm_here or 0.0)
    same = all(a.equal(b) for a, b in zip(stock.routing, paged.routing, strict=True))
    found.experts_hit.append(sorted(set(paged.routing[0].flatten().tolist())))
    found.note("routing", 0.0 if same else 1.0, f"step {step}")
    found.note("loss", _relative(loss_here, loss), f"step {step}")
    if norm is not None:
        found.note("norm", _relative(norm_here or 0.0, norm), f"step {step}")
    after, after_here = read_state(stock.engine), read_state(paged.engine)
    if after.keys() != after_here.keys():
        raise RuntimeError(f"the sides have different parameters: {sorted(after.keys() ^ after_here.keys())}")
    for name, kinds in after.items():
        for kind, value, scale in _deviations(kinds, after_here[name], before[name]):
            found.note(kind, value / scale if scale else float(value > 0.0), f"step {step}: {name}")
    return after


def _deviations(
    stock: dict[str, torch.Tensor], paged: dict[str, torch.Tensor], before: dict[str, torch.Tensor]
) -> Iterator[tuple[str, float, float]]:
    """Kind, distance from stock's, and the norm of stock's change that it is a share of, for one tensor."""
    for kind in KINDS:
        if kind not in stock:
            continue
        difference = paged[kind] - stock[kind]
        old = before.get(kind, torch.zeros_like(stock[kind]))
        if kind == WEIGHT:  # beyond one unit in the last place of the stored weight
            difference = (difference.abs() - stock[kind].abs() * torch.finfo(torch.float32).eps).clamp_min(0)
            yield "update", float(difference.norm()), float((stock[kind] - old).norm())
        elif kind == MOMENT1:
            yield "gradient", float(difference.norm()), float((stock[kind] - BETA1 * old).norm())
        elif kind == MOMENT2:
            yield "second moment", float(difference.norm()), float(stock[kind].norm())


def batches_of(case: Case, rank: int, world: int, step: int) -> list[torch.Tensor]:
    """Micro-batches of a step, others on every rank, the same at every call."""
    generator = torch.Generator().manual_seed(1000 * case.seed + step * world + rank)
    shape = (case.sequences, case.length)
    return [torch.randint(3, case.size.vocabulary, shape, generator=generator) for _ in range(case.accumulation)]


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / max(abs(reference), 1e-12)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _mutant(engine: Any) -> Iterator[None]:  # noqa: ANN401
    """One gradient page of the first module is multiplied by ``MUTANT_FACTOR`` before every reduction, on rank 0."""
    step = engine.experts_step
    reduce: Callable[[], None] = step.reduce

    def mutated() -> None:
        experts = engine.modules_in_pages[0]
        present = step.gradients.present(experts)
        if dist.get_rank() == 0:
            for _, page in step.gradients.pages(experts, names=present[:1], write=True):
                page.mul_(MUTANT_FACTOR)
        reduce()

    step.reduce = mutated
    try:
        yield
    finally:
        step.reduce = reduce

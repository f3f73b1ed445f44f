"""Steps with clipping by module under DeepSpeed, and the same steps in plain PyTorch in one process.

Both sides begin with the same weights and see the same tokens: the reference has those of all ranks in one batch, and
keeps experts as stock does, stacked in parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from megascale_omni.clipping import ClipConfig, ClipReport, CMSAClipper
from scripts.deepspeed_runs.models import build, configuration
from scripts.deepspeed_runs.proof import BETA1, Case, Side, batches_of
from scripts.deepspeed_runs.state import State, read_state

CLIP = {"mode": "cmsa", "alpha": 0.35}
LEARNING_RATE = 1e-4


@dataclass
class ClippedStep:
    """``modules``: norm, GVC, threshold and ratio of each, as in a JSON line."""

    loss: float
    norm: float
    skip: bool
    alpha: float | None
    modules: dict[str, dict[str, float]]


@dataclass
class ClippedRun:
    """Steps, and the state after the last one."""

    steps: list[ClippedStep]
    state: State
    skipped_steps: int = 0


def clipping_case(case: Case, **clip: object) -> Case:
    """The case with a section that clips by module, and a learning rate at which runs do not drift apart."""
    options = {**CLIP, **clip}
    if options["mode"] != "cmsa":
        del options["alpha"]  # it would have no effect
    section = {**case.section, "clip": options}
    optimizer = {
        "type": "AdamW",
        "params": {"lr": LEARNING_RATE, "betas": [BETA1, 0.95], "eps": 1e-5, "weight_decay": 0.1, "torch_adam": True},
    }
    rates = {"warmup_min_lr": LEARNING_RATE, "warmup_max_lr": LEARNING_RATE}
    scheduler = {"type": "WarmupLR", "params": {**rates, "warmup_num_steps": 2}}
    return replace(case, section=section, extra={**case.extra, "optimizer": optimizer, "scheduler": scheduler})


def clipped(rank: int, world: int, *, case: Case, spoil: Mapping[int, str] | None = None) -> ClippedRun:
    """A run under DeepSpeed, experts in pages. ``spoil``: step -> part of a parameter's name whose gradient is NaN at
    it, on the last rank. A collective.
    """
    side = Side(case, _model(case), megascale=True)
    found = []
    for step in range(case.steps):
        batches = batches_of(case, rank, world, step)
        where = (spoil or {}).get(step)
        with _spoiled(side.engine, where, here=rank == world - 1):
            loss, norm = side.step(batches)
        found.append(_as_step(loss, float("nan") if norm is None else norm, side.engine.clip_report))
    state, skipped = read_state(side.engine), side.engine.experts_step.clipping.skipped_steps
    side.engine.destroy()
    return ClippedRun(found, state, skipped)


def reference(world: int, *, case: Case) -> ClippedRun:
    """The same steps of ``world`` ranks in this process, without DeepSpeed."""
    model = _model(case)
    config: ClipConfig = ClipConfig(**case.section["clip"])  # type: ignore[arg-type]
    clipper = CMSAClipper.for_model(model, base=case.clipping, config=config)
    named = dict(model.named_parameters())
    adam = torch.optim.AdamW(
        named.values(), lr=LEARNING_RATE, betas=(BETA1, 0.95), eps=1e-5, weight_decay=0.1, foreach=False
    )
    found = []
    for step in range(case.steps):
        adam.zero_grad()
        of_ranks = [batches_of(case, rank, world, step) for rank in range(world)]
        losses = []
        for number in range(case.accumulation):
            batch = torch.cat([batches[number] for batches in of_ranks])
            loss = model(input_ids=batch, labels=batch).loss
            losses.append(float(loss))
            (loss / case.accumulation).backward()
            clipper.report_loss(loss.detach())
        report = clipper.clip(named.items())
        if not report.skip:
            adam.step()
        found.append(_as_step(sum(losses) / len(losses), report.norm, report))
    kinds = ("exp_avg", "exp_avg_sq")
    state = {n: {"weight": p.detach().clone(), **{k: adam.state[p][k] for k in kinds}} for n, p in named.items()}
    return ClippedRun(found, state, clipper.skipped_steps)


def numbers_apart(found: ClippedRun, expected: ClippedRun) -> float:
    """The largest relative difference of any step's norm, or of any module's norm, GVC, threshold or ratio.

    Raises:
        RuntimeError: modules are other ones, or nothing was clipped, so that equality would say little.
    """
    worst, clipped_ones = 0.0, 0
    for step, wanted in zip(found.steps, expected.steps, strict=True):
        if step.modules.keys() != wanted.modules.keys() or len(wanted.modules) < 2:
            raise RuntimeError(f"modules {list(step.modules)} instead of {list(wanted.modules)}")
        pairs = [(step.norm, wanted.norm)]
        for name, of in wanted.modules.items():
            clipped_ones += of["clip_ratio"] < 1.0
            pairs += [(step.modules[name][key], value) for key, value in of.items()]
        worst = max([worst, *(abs(a - b) / abs(b) if a != b else 0.0 for a, b in pairs)])
    if not clipped_ones:
        raise RuntimeError("nothing was clipped")
    return worst


def states_apart(found: ClippedRun, expected: ClippedRun) -> tuple[float, str]:
    """The largest distance of a moment, as a share of its norm, and where."""
    worst, where = 0.0, ""
    for name, kinds in expected.state.items():
        for kind in ("exp_avg", "exp_avg_sq"):
            value, wanted = found.state[name][kind], kinds[kind]
            distance = float((value - wanted).norm() / wanted.norm().clamp_min(1e-30))
            if not distance <= worst:
                worst, where = distance, f"{name} {kind}"
    return worst, where


def _model(case: Case) -> torch.nn.Module:
    config = configuration(case.family, case.size, experts_implementation=case.experts_implementation)
    return build(copy.deepcopy(config), seed=7)


def _as_step(loss: float, norm: float, report: ClipReport | None) -> ClippedStep:
    if report is None:
        return ClippedStep(loss, norm, False, None, {})
    modules: Any = report.as_record()["mpus"]
    return ClippedStep(loss, norm, report.skip, report.alpha, modules)


@contextmanager
def _spoiled(engine: Any, where: str | None, *, here: bool) -> Any:  # noqa: ANN401 - a context
    """One element of a gradient is NaN while it lasts: of a dense parameter, or of a page of experts."""
    if where is None or not here:
        yield
        return
    handles: list[Any] = []
    fired: list[str] = []
    for name, parameter in engine.module.named_parameters():
        if where in name and parameter.requires_grad:
            handles.append(parameter.register_hook(_spoiler(name, fired)))
    for experts in engine.modules_in_pages:
        if where in experts.path:
            handles.append(experts.register_forward_hook(_through(experts.path, fired)))
    yield
    for handle in handles:
        handle.remove()
    if not fired:
        raise RuntimeError(f"no gradient under {where!r} was spoiled")


def _spoiler(name: str, fired: list[str]) -> Callable[[torch.Tensor], torch.Tensor]:
    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        fired.append(name)
        gradient = gradient.clone()
        gradient.view(-1)[0] = float("nan")
        return gradient

    return spoil


def _through(name: str, fired: list[str]) -> Callable[..., torch.Tensor]:
    """The gradient that enters the experts is spoiled, so that their pages' are, and everything before them."""

    def hook(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        output.register_hook(_spoiler(name, fired))
        return output

    return hook

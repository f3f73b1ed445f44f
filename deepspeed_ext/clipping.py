"""Clipping by module (CMSA) over DeepSpeed's part and the pages, and steps that are left out.

Both classes stand where :class:`deepspeed_ext.norms.SharedNorm` does otherwise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_ext.dense_gradients import dense_gradients
from deepspeed_ext.experts import DeepSpeedExperts
from deepspeed_ext.gradient_limits import DenseGradients, Limit
from megascale_omni.clipping import ClipConfig, ClipReport, CMSAClipper, Group
from megascale_omni.clipping.agreement import agreed_experts, agreed_mpus, say_what_changes
from megascale_omni.clipping.statistics import GradientStatistics
from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.shards import PageShards

logger = logging.getLogger(__name__)


class ModuleClipping:
    """Gradients of DeepSpeed's optimizer and of pages, clipped module by module.

    Args:
        config: the clipping options. base: the norm that thresholds refer to, where ``config`` has none. optimizer:
        DeepSpeed's, as the engine holds it. model: whose parameters it has. gradients: the pages' gradients. shards:
        every page on one of the ranks that have it. device: where collectives take tensors from.

    Raises:
        ValueError: no clipping norm above 0, or patterns that do not fit the model; on every rank.
    """

    def __init__(
        self,
        config: ClipConfig,
        *,
        base: float,
        optimizer: Any,  # noqa: ANN401 - DeepSpeed's optimizers have no common base
        model: torch.nn.Module,
        gradients: ExpertGradients,
        shards: PageShards,
        device: torch.device,
    ) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        tensors = {experts: _tensors(experts) for experts in gradients.modules}
        mpus = agreed_mpus(config, [*names.values(), *(name for of in tensors.values() for name in of)])
        of_experts = agreed_experts(mpus, {experts.path: of for experts, of in tensors.items()})
        self._mpu_of_experts = {experts: of_experts[experts.path] for experts in tensors}
        self.clipper = CMSAClipper(
            mpus,
            base=base if config.base is None else config.base,
            config=config,
            ranks=Group(device=device),
            speaks=dist.get_rank() == 0,
        )
        self._is_one = len(mpus.names) == 1
        self.experts = 0.0
        """Norm of all experts' gradients; asked for where the whole model is one module."""
        self.norm = 0.0
        """See :class:`deepspeed_ext.dense_gradients.Verdict`."""
        self._gradients, self._shards = gradients, shards
        gradients.takes_sums, gradients.takes_norms = True, self._is_one
        self._dense = dense_gradients(optimizer, names)
        self._dense.bulk = next((experts.manager.bulk for experts in gradients.modules), None)
        self._dense.install(self)
        if dist.get_rank() == 0:
            logger.warning("%s", say_what_changes(config, base=self.clipper.base, mpus=mpus))

    @property
    def wants_experts_norm(self) -> bool:
        """Whether ``experts`` is to be set before each step."""
        return self._is_one

    @property
    def total(self) -> float | None:
        """Norm over both parts."""
        return self.norm

    @property
    def report(self) -> ClipReport | None:
        """Of the last step."""
        return self.clipper.last

    @property
    def skipped_steps(self) -> int:
        """Steps that were left out."""
        return self.clipper.skipped_steps

    def decide(self) -> bool:
        """See :class:`deepspeed_ext.dense_gradients.Verdict`."""
        norm = self._dense.norm_with(self.experts) if self._is_one else None
        report = self.clipper.decide(
            self._dense.parts(), known=self._known(), norm=norm, non_finite=lambda: self._gradients.non_finite
        )
        self.norm = report.norm if not report.skip else math.inf
        return report.skip

    def limit(self, parameter: str) -> Limit | None:
        """See :class:`deepspeed_ext.dense_gradients.Verdict`."""
        return self._limit(self.clipper.mpus.index(parameter))

    def _limit(self, index: int) -> Limit | None:
        report = self.clipper.last
        assert report is not None
        module = report.modules[index]
        return None if module.threshold is None else Limit(module.norm, module.threshold)

    def coefficient(self) -> dict[PagedExperts, float]:
        """What the pages' gradients are to be multiplied by, where it is not 1."""
        limits = {experts: self._limit(index) for experts, index in self._mpu_of_experts.items()}
        found = {experts: float(self._dense.factor(limit)) for experts, limit in limits.items() if limit is not None}
        return {experts: factor for experts, factor in found.items() if factor < 1.0}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: plain values."""
        return self.clipper.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint, also one of a run that clipped as stock."""
        self.clipper.load_state_dict(state)

    def _known(self) -> Iterator[tuple[int, GradientStatistics, float]]:
        for experts, index in self._mpu_of_experts.items():
            yield index, self._gradients.sums(experts, self._shards), 1.0


class SkippingClipping:
    """Stock's clipping, but a step whose gradients are not finite is left out on all ranks, whatever the optimizer."""

    report = None
    wants_experts_norm = True

    def __init__(
        self,
        *,
        max_norm: float,
        optimizer: Any,  # noqa: ANN401
        model: torch.nn.Module,
        gradients: ExpertGradients,
    ) -> None:
        self.skipped_steps = 0
        self.experts = 0.0
        self.norm = 0.0
        self._max_norm = max_norm
        self._gradients = gradients
        self._dense: DenseGradients = dense_gradients(optimizer, {id(p): n for n, p in model.named_parameters()})
        self._dense.bulk = next((experts.manager.bulk for experts in gradients.modules), None)
        self._dense.install(self)

    @property
    def total(self) -> float | None:
        """Norm over both parts."""
        return self.norm

    def decide(self) -> bool:
        """The norm is the same number on every rank, so that they decide alike."""
        self.norm = self._dense.norm_with(self.experts)
        for _ in self._dense.parts():  # where they lie is needed to multiply them
            pass
        if math.isfinite(self.norm):
            return False
        self.skipped_steps += 1
        self.norm = math.inf
        self._say_where()
        return True

    def limit(self, parameter: str) -> Limit | None:
        """See :class:`deepspeed_ext.dense_gradients.Verdict`."""
        return Limit(self.norm, self._max_norm) if self._max_norm > 0.0 else None

    def coefficient(self) -> float | None:
        """What all pages' gradients are to be multiplied by."""
        limit = self.limit("")
        factor = 1.0 if limit is None else float(self._dense.factor(limit))
        return factor if factor < 1.0 else None

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: plain values."""
        return {"skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint, also one of a run that clipped by module."""
        self.skipped_steps = int(state["skipped_steps"])

    def _say_where(self) -> None:
        """Logs which parameter or expert it was. A collective of all ranks."""
        bad = next((p.name for p in self._dense.parts() if not bool(torch.isfinite(p.gradient).all())), None)
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, bad or self._gradients.non_finite)
        if dist.get_rank() == 0:
            places = "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(found) if what is not None)
            logger.warning("step left out (%d so far): gradients are not finite: %s", self.skipped_steps, places)


def clipping_for(
    config: ClipConfig,
    *,
    max_norm: float,
    optimizer: Any,  # noqa: ANN401
    model: torch.nn.Module,
    gradients: ExpertGradients,
    shards: PageShards,
    device: torch.device,
) -> ModuleClipping | SkippingClipping:
    """What a section that asks for more than stock's clipping gets. A collective of all ranks.

    Raises:
        ValueError: see :class:`ModuleClipping`.
    """
    if config.is_cmsa:
        return ModuleClipping(
            config,
            base=max_norm,
            optimizer=optimizer,
            model=model,
            gradients=gradients,
            shards=shards,
            device=device,
        )
    return SkippingClipping(max_norm=max_norm, optimizer=optimizer, model=model, gradients=gradients)


def refuse_misfit(
    config: ClipConfig, *, max_norm: float, names: Sequence[str], modules: Sequence[DeepSpeedExperts]
) -> None:
    """Refuses options that :class:`ModuleClipping` would refuse, before there is an optimizer. A collective.

    ``names``: of parameters beside experts. Raises ValueError on every rank.
    """
    if config.is_cmsa:
        tensors = {experts.path: _tensors(experts) for experts in modules}
        mpus = agreed_mpus(config, [*names, *(name for of in tensors.values() for name in of)])
        agreed_experts(mpus, tensors)
        CMSAClipper(mpus, base=max_norm if config.base is None else config.base, config=config, speaks=False)


def monitor_events(report: ClipReport, samples: int) -> list[tuple[str, float, int]]:
    """What DeepSpeed's monitor (TensorBoard and others) is told of a step: name, value, samples seen."""
    found = [] if report.alpha is None else [("Train/Clip/alpha", report.alpha, samples)]
    for module in report.modules:
        numbers = {
            "norm": module.norm,
            "gvc": module.gvc,
            "threshold": module.threshold,
            "clip_ratio": module.coefficient,
        }
        found += [(f"Train/Clip/{module.name}/{k}", v, samples) for k, v in numbers.items() if v is not None]
    return found


def _tensors(experts: DeepSpeedExperts | PagedExperts) -> Sequence[str]:
    return [f"{experts.path}.{tensor.name}" for tensor in experts.names.tensors()]

"""Clipping by module over stock's dense optimizers and the experts' pages (see :mod:`megascale_omni.clipping`)."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megascale_omni.clipping import ClipConfig, ClipReport, CMSAClipper, GradientPart, Group
from megascale_omni.clipping.agreement import agreed_experts, agreed_mpus, say_what_changes
from megascale_omni.clipping.statistics import GradientStatistics
from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.shards import PageShards

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")
_OUTPUT, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class _Place:
    """Where an optimizer keeps a model parameter, or this rank's shard of it."""

    member: MegatronOptimizer
    group: int
    position: int
    name: str

    @property
    def parameter(self) -> torch.nn.Parameter:
        """What the optimizer steps now: stock replaces parameters when it loads some states."""
        found: torch.nn.Parameter = self.member.optimizer.param_groups[self.group]["params"][self.position]
        return found


class ModuleClipping:
    """Gradients of stock's optimizers and of pages, clipped module by module.

    Args:
        config: the clipping options. clip_grad: stock's clipping norm. chunks: model chunks of this rank, unwrapped.
        dense: stock's optimizers. gradients: the pages' gradients. shards: which pages this rank sums. stats_group:
        ranks over which the pages' sums are the whole model's. device: where collectives take tensors from.

    Raises:
        ValueError: no clipping norm above 0, or patterns that do not fit the model; on every rank.
    """

    def __init__(
        self,
        config: ClipConfig,
        *,
        clip_grad: float,
        chunks: Sequence[torch.nn.Module],
        dense: ChainedOptimizer,
        gradients: Sequence[ExpertGradients],
        shards: PageShards,
        stats_group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._gradients = tuple(gradients)
        self._shards = shards
        self._paged_share = stats_group.size() / dist.get_world_size()
        names = global_names(chunks)
        self._paths = {module: names[module] for chunk in gradients for module in chunk.modules}
        mpus = agreed_mpus(config, _all_names(names))
        of_experts = agreed_experts(mpus, {path: _expert_tensors(m, path) for m, path in self._paths.items()})
        self._mpu_of_experts = {module: of_experts[path] for module, path in self._paths.items()}
        self._places = list(_places(dense, names))
        self.clipper = CMSAClipper(
            mpus,
            base=clip_grad if config.base is None else config.base,
            config=config,
            ranks=Group(device=device),
            speaks=dist.get_rank() == 0,
        )
        self._is_one = len(mpus.names) == 1
        for chunk in self._gradients:
            chunk.takes_sums, chunk.takes_norms = True, self._is_one
        if dist.get_rank() == 0:
            logger.warning("%s", say_what_changes(config, base=self.clipper.base, mpus=mpus))

    def report_loss(self, loss: torch.Tensor) -> None:
        """Mean loss a token of a micro-batch."""
        self.clipper.report_loss(loss)

    @property
    def report(self) -> ClipReport | None:
        """Of the last step."""
        return self.clipper.last

    @property
    def skipped_steps(self) -> int:
        """Steps that were left out."""
        return self.clipper.skipped_steps

    def clip(self, stock_norm: Callable[[], float]) -> float | None:
        """Clips the dense gradients; the whole norm, or None where the step must be left out. A collective.

        ``stock_norm`` is asked where the whole model is one module: it is then clipped to the bit as stock does.
        """
        report = self.clipper.decide(
            self._parts(), known=self._known(), norm=stock_norm() if self._is_one else None, non_finite=self._bad_page
        )
        if report.skip:
            return None
        self._clip_dense(report)
        return report.norm

    def _clip_dense(self, report: ClipReport) -> None:
        """By stock's own function."""
        by_module: dict[int, list[torch.nn.Parameter]] = {}
        for place in self._places:
            by_module.setdefault(self.clipper.mpus.index(place.name), []).append(place.parameter)
        for index, parameters in by_module.items():
            module = report.modules[index]
            if module.threshold is not None:
                clip_grad_by_total_norm_fp32(parameters, max_norm=module.threshold, total_norm=module.norm)

    def of_experts(self) -> dict[PagedExperts, float]:
        """What each module of experts' gradients are to be multiplied by, where it is not 1."""
        report = self.clipper.last
        assert report is not None
        found = {module: report.modules[index].coefficient for module, index in self._mpu_of_experts.items()}
        return {module: coefficient for module, coefficient in found.items() if coefficient < 1.0}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return self.clipper.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint, also one of a run that clipped as stock."""
        self.clipper.load_state_dict(state)

    def _parts(self) -> Iterator[GradientPart]:
        """Dense gradients that stock would count on this rank."""
        world = dist.get_world_size()
        shares = {id(p.member): p.member.get_grad_stats_parallel_group().size() / world for p in self._places}
        for place in self._places:
            parameter = place.parameter
            tp_group = getattr(place.member, "tp_group", None)
            if (
                parameter.grad is not None
                and param_is_not_shared(parameter)
                and param_is_not_tensor_parallel_duplicate(parameter, tp_group)
            ):
                yield GradientPart(place.name, parameter.grad, shares[id(place.member)])

    def _known(self) -> Iterator[tuple[int, GradientStatistics, float]]:
        for gradients in self._gradients:
            for module in gradients.modules:
                found = gradients.sums(module, self._shards)
                yield self._mpu_of_experts[module], found, self._paged_share

    def _bad_page(self) -> str | None:
        return next((gradients.non_finite for gradients in self._gradients if gradients.non_finite is not None), None)


class SkippingClipping:
    """Stock's clipping, but a step whose gradients are not finite is left out on all ranks.

    The norm is the same number on every rank, so that they decide alike.
    """

    report = None

    def __init__(self, *, clip_grad: float, dense: ChainedOptimizer, gradients: Sequence[ExpertGradients]) -> None:
        self.skipped_steps = 0
        self._clip_grad = clip_grad
        self._dense = dense
        self._gradients = tuple(gradients)
        self._coefficient: float | None = None

    def clip(self, stock_norm: Callable[[], float]) -> float | None:
        """As :meth:`ModuleClipping.clip`."""
        norm = stock_norm()
        if not math.isfinite(norm):
            self.skipped_steps += 1
            self._say_where()
            return None
        coefficient = self._clip_grad / (norm + 1.0e-6) if self._clip_grad > 0.0 else 1.0
        self._coefficient = coefficient if coefficient < 1.0 else None
        for member in self._dense.chained_optimizers:
            if self._clip_grad > 0.0 and not getattr(member, "is_stub_optimizer", False):
                clip_grad_by_total_norm_fp32(member.get_parameters(), max_norm=self._clip_grad, total_norm=norm)
        return norm

    def of_experts(self) -> float | None:
        """What all experts' gradients are to be multiplied by."""
        return self._coefficient

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint, also one of a run that clipped by module."""
        self.skipped_steps = int(state["skipped_steps"])

    def _say_where(self) -> None:
        """Logs which expert or parameter it was. A collective of all ranks."""
        bad = next((chunk.non_finite for chunk in self._gradients if chunk.non_finite is not None), None)
        bad = bad or ("a dense parameter" if self._has_bad_parameter() else None)
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, bad)
        if dist.get_rank() == 0:
            places = "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(found) if what is not None)
            logger.warning("step left out (%d so far): gradients are not finite: %s", self.skipped_steps, places)

    def _has_bad_parameter(self) -> bool:
        gradients = (p.grad for m in self._dense.chained_optimizers for p in m.get_parameters() if p.grad is not None)
        return any(not bool(torch.isfinite(gradient).all()) for gradient in gradients)


def tell_loss(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    model: torch.nn.Module,
    output_tensor: torch.Tensor,
    loss_func: Callable[..., Any] | None,
    config: Any,  # noqa: ANN401 - stock's signature, here and below
    vp_stage: int | None,
    collect_non_loss_data: bool,
    num_microbatches: int,
    forward_data_store: list[Any],
    cp_group_size: int | None = None,
    is_last_stage: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stock's ``forward_step_calc_loss``; a training loss goes to the model chunk's ``loss_listener``.

    The loss is taken here because pipeline schedules free its memory before the backward, which needs its graph alone.
    """
    result, tokens = original(
        model,
        output_tensor,
        loss_func,
        config,
        vp_stage,
        collect_non_loss_data,
        num_microbatches,
        forward_data_store,
        cp_group_size,
        is_last_stage,
    )
    listener = getattr(model, "loss_listener", None)
    # Where this is not the last stage, or not a loss, stock hands the output back as it is.
    if listener is not None and result is not output_tensor and result.requires_grad:
        loss = result.detach().sum()
        per_token = config.calculate_per_token_loss
        listener(loss / tokens.clamp(min=1) if per_token else loss * num_microbatches)
    return result, tokens


def global_names(chunks: Sequence[torch.nn.Module]) -> dict[Any, str]:
    """Names of parameters and modules of paged experts as they would be in one process.

    Pipeline stages number their layers from 0; stock's layers know their number in the whole model. The last stage has
    a copy of the first one's embedding as its output layer, where these share their weights: it is the same parameter.
    """
    found: dict[Any, str] = {}
    for chunk in chunks:
        renamed: dict[str, str] = {}
        for path, module in chunk.named_modules():
            match, number = _LAYER.search(path), getattr(module, "layer_number", None)
            if match is not None and isinstance(number, int):
                renamed[path] = f"{path[: match.start(1)]}{number - 1}"
        for path, module in chunk.named_modules():
            if isinstance(module, PagedExperts):
                found[module] = _renamed(path, renamed)
        for name, parameter in chunk.named_parameters():
            found[parameter] = _renamed(name, renamed)
            if name.endswith(_OUTPUT) and getattr(parameter, "shared_embedding", False):
                found[parameter] = name.removesuffix(_OUTPUT) + _EMBEDDING
    return found


def _renamed(name: str, renamed: dict[str, str]) -> str:
    for old, new in renamed.items():
        if name.startswith(f"{old}."):
            return new + name[len(old) :]
    return name


def _expert_tensors(module: PagedExperts, path: str) -> list[str]:
    return [f"{path}.{tensor.name}" for tensor in module.names.tensors()]


def _all_names(names: dict[Any, str]) -> Iterator[str]:
    for key, name in names.items():
        yield from _expert_tensors(key, name) if isinstance(key, PagedExperts) else [name]


def _places(dense: ChainedOptimizer, names: dict[Any, str]) -> Iterator[_Place]:
    """Every parameter of stock's optimizers, with the name that the model has for it."""
    for member in dense.chained_optimizers:
        if getattr(member, "is_stub_optimizer", False):
            continue
        if isinstance(member, DistributedOptimizer):
            for parameter, (group, position) in member.model_param_group_index_map.items():
                yield _Place(member, group, position, names[parameter])
            continue
        owners = {id(getattr(parameter, "main_param", parameter)): parameter for parameter in _parameters(names)}
        for group, settings in enumerate(member.optimizer.param_groups):
            for position, parameter in enumerate(settings["params"]):
                yield _Place(member, group, position, names[owners[id(parameter)]])


def _parameters(names: dict[Any, str]) -> list[torch.nn.Parameter]:
    return [key for key in names if isinstance(key, torch.nn.Parameter)]

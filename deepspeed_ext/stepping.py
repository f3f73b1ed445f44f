"""The experts' share of an optimizer step: gradients reduced and measured, then pages stepped as the rest was."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_ext.clipping import ModuleClipping, SkippingClipping, clipping_for
from deepspeed_ext.experts import DeepSpeedExperts
from deepspeed_ext.messages import said_in_json
from deepspeed_ext.norms import SharedNorm
from deepspeed_ext.parameters import Places
from deepspeed_ext.run import Run
from megascale_omni.experts.completion import LastGradients
from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.experts.shards import PageShards
from megascale_omni.optimizer.arithmetic import AdamArithmetic, arithmetic_for
from megascale_omni.optimizer.paged_adam import GroupBinding, PagedAdam
from megascale_omni.optimizer.rates import settle_for
from megascale_omni.paging.planes import Plane

_HYPERPARAMETERS = ("lr", "weight_decay", "betas", "eps")
_CHECKED = ("amsgrad", "maximize")


class ExpertsStep:
    """What happens to the experts of an engine at its optimizer step.

    Args:
        run: what the modules share. modules: paged experts. optimizer: the engine's, as DeepSpeed wrapped it. basic:
        the one inside. places: parameter groups of the modules. sharded: whether each page's state is kept by one of
        the ranks that have it (ZeRO 1 to 3), or by all (ZeRO 0). max_norm: ``gradient_clipping``. average: whether
        gradients are averaged over ranks or summed. model: the engine's. backwards: how many of them a step has, None
        where nobody knows.

    Raises:
        ValueError: an optimizer whose arithmetic paged experts do not have, a budget that is too small, or clipping
        options that do not fit the model.
    """

    def __init__(
        self,
        run: Run,
        modules: list[DeepSpeedExperts],
        *,
        optimizer: Any,  # noqa: ANN401 - DeepSpeed's optimizers have no common base
        basic: torch.optim.Optimizer,
        places: Places,
        sharded: bool,
        max_norm: float,
        average: bool,
        model: torch.nn.Module,
        backwards: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.run = run
        self.gradients = ExpertGradients(modules)
        self.gradients.counts_zeros = False
        self._optimizer = optimizer
        self._average = average
        self._counted_once = counted_once(run)
        self.clipping = self._clipping(model, max_norm)
        self.norm = self.clipping or SharedNorm(optimizer, max_norm=max_norm, bulk=run.manager.bulk)
        arithmetic = arithmetic_of(basic, device=run.manager.arena.device, kernels=run.backend.name == "triton")
        bindings = self._bindings(modules, places)
        add_state(run, bindings)
        with said_in_json():
            choice = run.section.config.compute.optimizer_device
            settled = settle_for(choice, modules=list(bindings), arithmetic=arithmetic)
        self.adam = PagedAdam(
            bindings.items(),
            groups=[self._settings(group) for group in optimizer.param_groups],
            arithmetic=arithmetic,
            shards=self._counted_once if sharded else PageShards(),
            max_lag=run.section.config.paging.max_lag_steps,
            in_host=settled.in_host,
        )
        if self._completes_in_backward():
            LastGradients(self.gradients, scale=self._scale, backwards=backwards)
        for _ in range(_steps_made(basic)):  # some of DeepSpeed's optimizers begin with a step of zero gradients
            self.adam.step()

    def _clipping(self, model: torch.nn.Module, max_norm: float) -> ModuleClipping | SkippingClipping | None:
        """What the section asks for beside stock's clipping."""
        config = self.run.section.config.clip
        if not config.skips_nonfinite:
            return None
        with said_in_json():
            return clipping_for(
                config,
                max_norm=max_norm,
                optimizer=self._optimizer,
                model=model,
                gradients=self.gradients,
                shards=self._counted_once,
                device=self.run.manager.arena.device,
            )

    @staticmethod
    def _bindings(modules: list[DeepSpeedExperts], places: Places) -> dict[DeepSpeedExperts, GroupBinding]:
        bindings = {experts: places.binding(experts) for experts in modules if experts.trainable}
        for experts, binding in bindings.items():
            if binding is None:  # the optimizer was not given them
                experts.requires_grad_(False)
        return {experts: binding for experts, binding in bindings.items() if binding is not None}

    @staticmethod
    def _settings(group: dict[str, Any]) -> dict[str, Any]:
        return {**{key: group[key] for key in _HYPERPARAMETERS}, "params": []}

    @property
    def _scale(self) -> float:
        return 1.0 / dist.get_world_size() if self._average else 1.0

    def _completes_in_backward(self) -> bool:
        """Whether a gradient is complete after this rank's own backwards: no other rank adds to it."""
        manager = self.run.manager
        if not self.run.section.config.paging.step_in_backward or self._counted_once.size > 1:
            return False
        # On an accelerator that holds every page, a look at each gradient would make the host wait for nothing.
        return manager.arena.device.type == "cpu" or manager.pager.can_evict

    def reduce(self) -> None:
        """Gradients of all ranks become one; takes their norm where it is asked for. A collective of all ranks."""
        world = dist.get_world_size()
        self.gradients.finish(scale=self._scale, group=self.run.ranks.data, shards=self.adam.shards)
        if self.clipping is not None and not self.clipping.wants_experts_norm:
            return
        squares = torch.tensor([self.gradients.squares(self._counted_once)], dtype=torch.float64)
        if world > 1:
            squares = squares.to(self.run.manager.arena.device)
            dist.all_reduce(squares)
        self.norm.experts = math.sqrt(float(squares))

    def note_hyperparameters(self) -> None:
        """Takes over what schedulers have set; call it before DeepSpeed steps, which may step the scheduler too."""
        for ours, theirs in zip(self.adam.param_groups, self._optimizer.param_groups, strict=True):
            ours.update({key: theirs[key] for key in _HYPERPARAMETERS})

    def apply(self) -> None:
        """Steps every page, by what DeepSpeed clipped by. A collective where state is sharded."""
        self.adam.step(clip_coefficient=self.norm.coefficient())


def add_state(run: Run, modules: Iterable[DeepSpeedExperts]) -> None:
    """Gives modules the planes of the optimizer's state.

    Raises:
        ValueError: a device budget that is too small for them, or a disk.
    """
    for experts in modules:
        if experts.pages.dtypes[Plane.WEIGHT] is not torch.float32:
            run.manager.set_plane_dtype(experts.pages, Plane.MASTER, torch.float32)
        for plane in (Plane.MOMENT1, Plane.MOMENT2):
            run.manager.set_plane_dtype(experts.pages, plane, torch.float32)
    run.check_budget()


def refuse_optimizer(optimizer: object, config: Mapping[str, Any]) -> None:
    """Refuses, before anything is made of it, an optimizer whose arithmetic paged experts do not have.

    ``optimizer``: the client's, None where the configuration names one. A function that makes it is not called here.

    Raises:
        ValueError: see :func:`arithmetic_of`.
    """
    section = config.get("optimizer") or {}
    if isinstance(optimizer, torch.optim.Optimizer):
        arithmetic_of(optimizer)
    elif optimizer is None and section:
        name, options = str(section.get("type")), section.get("params") or {}
        if name.lower() not in ("adam", "adamw"):
            raise ValueError(f"optimizer {name} is not supported with megascale; use Adam or AdamW")
        arithmetic_of(torch.optim.AdamW([torch.empty(0)], **{k: options[k] for k in _CHECKED if k in options}))


def drops_gradients(stage: int, *, of_optimizer: bool, boundary: bool) -> bool:
    """Whether a ``zero_grad`` between backward and step drops DeepSpeed's gradients, and so those of experts.

    ``of_optimizer``: the optimizer's, else the engine's. ``boundary``: the micro-batch is the last of its step. ZeRO 2
    keeps what it has reduced until then; ZeRO 3's partitions know of its optimizer's ``zero_grad`` only.
    """
    if stage == 3:
        return of_optimizer
    return stage < 2 or boundary


def counted_once(run: Run) -> PageShards:
    """Every page on one of the ranks that have it."""
    data = run.ranks.data
    if data is None or dist.get_world_size(data) == 1:
        return PageShards()
    return PageShards(rank=dist.get_rank(data), size=dist.get_world_size(data), group=data)


def arithmetic_of(
    basic: torch.optim.Optimizer, *, device: torch.device | None = None, kernels: bool = False
) -> AdamArithmetic:
    """Adam's operations as the dense part performs them.

    DeepSpeed's own kernels (``FusedAdam``, ``DeepSpeedCPUAdam``) compute torch's formulas with fused roundings; for
    them pages are stepped by torch's operations. On CUDA these are its foreach kernels, except where the optimizer says
    ``foreach=False``. ``device``: of the pages; ``kernels``: whether a Triton kernel steps them there.

    Raises:
        ValueError: an optimizer other than Adam or AdamW, or one with amsgrad or maximize.
    """
    name, defaults = type(basic).__name__, basic.defaults
    if isinstance(basic, torch.optim.AdamW):
        decoupled = True
    elif isinstance(basic, torch.optim.Adam):
        decoupled = bool(defaults.get("decoupled_weight_decay", False))
    elif name in ("FusedAdam", "DeepSpeedCPUAdam"):
        decoupled = bool(getattr(basic, "adam_w_mode", False))
        if defaults.get("bias_correction") is False:
            raise ValueError(f"{name} without bias_correction is not supported with megascale; leave it on")
    else:
        raise ValueError(f"optimizer {name} is not supported with megascale; use Adam or AdamW")
    if any(group.get("maximize") for group in (defaults, *basic.param_groups)):
        raise ValueError("maximize is not supported with megascale; minimise the negated loss")
    return arithmetic_for(
        decoupled=decoupled,
        fused=bool(defaults.get("fused")),
        amsgrad=any(bool(group.get("amsgrad", False)) for group in (defaults, *basic.param_groups)),
        device=None if defaults.get("foreach") is False else device,
        kernels=kernels,
    )


def _steps_made(basic: torch.optim.Optimizer) -> int:
    """Steps that the dense optimizer has made already, before training."""
    return max((int(state["step"]) for state in basic.state.values() if "step" in state), default=0)

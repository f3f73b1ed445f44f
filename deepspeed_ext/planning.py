"""What ``deepspeed.initialize`` will do with a model, found out before anything of the caller's is changed.

Everything that can be refused is refused here: model, optimizer and parameter lists are then as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_ext.clipping import refuse_misfit
from deepspeed_ext.config import Section
from deepspeed_ext.convert import Dtypes, Move, plan_hf_experts
from deepspeed_ext.experts import DeepSpeedExperts, broadcast
from deepspeed_ext.messages import said_in_json
from deepspeed_ext.native import common_ranks, moe_layers, plan_native_experts
from deepspeed_ext.parameters import Places, everything_in_group_0, take_out_of, watched, without_experts
from deepspeed_ext.run import Run, run_for
from deepspeed_ext.stepping import add_state, refuse_optimizer
from megascale_omni.ranks import all_or_none


@dataclass
class Start:
    """What an engine begins with.

    Attributes: run: what its paged modules share. built: modules that were built in pages. move: what else goes there.
    places: their parameter groups. optimizer, model_parameters: the client's, without experts.
    """

    run: Run
    built: list[DeepSpeedExperts]
    move: Move
    places: Places
    optimizer: Any
    model_parameters: list[Any] | None

    @property
    def modules(self) -> list[DeepSpeedExperts]:
        """All paged modules."""
        return [*self.built, *self.move.modules]

    def carry_out(self) -> None:
        """Changes model and optimizer. A collective of all ranks."""
        for module in self.built:
            broadcast(module)
        self.move.carry_out()


def planned(
    model: torch.nn.Module,
    section: Section,
    config: Mapping[str, Any],
    *,
    optimizer: Any,  # noqa: ANN401 - as stock takes it: an optimizer, a function that makes one, or None
    model_parameters: Iterable[Any] | None,
) -> Start:
    """Plans; nothing of the caller's is changed, and nothing is left where it raises. A collective of all ranks.

    Raises:
        ValueError: what paged experts cannot stand for, by name.
    """
    built = [module for module in model.modules() if isinstance(module, DeepSpeedExperts)]
    run = _run(model, built, section, config)
    steps = optimizer is not None or bool(config.get("optimizer"))

    def here() -> Start:
        start = _start(model, run, built, config, optimizer, model_parameters)
        _refuse_no_experts(start.modules, section)
        _refuse_experts_alone(model, start, config)
        if steps:
            refuse_optimizer(optimizer, config)
            add_state(run, [e for e in start.move.modules if start.places.binding(e) is not None])
        run.check_budget()
        return start

    try:
        start = all_or_none(here)  # machines differ in memory and folders, and ranks in what they were given
        if steps:
            _refuse_misfit_clipping(model, start, section, config)
    except BaseException:
        if not built:
            run.close()
        raise
    return start


def _run(model: torch.nn.Module, built: list[DeepSpeedExperts], section: Section, config: Mapping[str, Any]) -> Run:
    """The run of modules that were built in pages, or a new one.

    Raises:
        ValueError: they were built under another configuration.
    """
    if any(module.run.section != section for module in built):
        raise ValueError(
            "the model was built under deepspeed_ext.init with another megascale section; give the same configuration "
            "to deepspeed.initialize"
        )
    dtypes = Dtypes.of_config(config)
    for module in built:
        dtypes.check(module)
    layers = moe_layers(model)
    size = common_ranks(layers, section.expert_parallel_size) if layers else section.expert_parallel_size
    return built[0].run if built else run_for(section, expert_parallel_size=size)


def _start(
    model: torch.nn.Module,
    run: Run,
    built: list[DeepSpeedExperts],
    config: Mapping[str, Any],
    optimizer: Any,  # noqa: ANN401
    model_parameters: Iterable[Any] | None,
) -> Start:
    # A generator of parameters would find no experts when they have moved.
    given = None if model_parameters is None else list(model_parameters)
    dtypes, move = Dtypes.of_config(config), Move()
    plan_hf_experts(model, run, dtypes, move)
    plan_native_experts(model, run, dtypes, move)
    if isinstance(optimizer, torch.optim.Optimizer):
        return Start(run, built, move, take_out_of(optimizer, move), optimizer, given)
    made = None if optimizer is None else watched(optimizer)
    if given is None:
        return Start(run, built, move, everything_in_group_0(move), made, None)
    remaining, places = without_experts(given, move)
    return Start(run, built, move, places, made, remaining)


def _refuse_no_experts(modules: list[DeepSpeedExperts], section: Section) -> None:
    """Raises ValueError where the section asks for nothing that a model without experts could have."""
    if not modules and not section.config.clip.skips_nonfinite:
        raise ValueError(
            "the megascale section is enabled and the model has no experts that can be paged: it needs Hugging Face "
            'experts modules or DeepSpeed\'s MoE layers; set "enabled": false for a dense model, or clip it by '
            'module: "clip": {"mode": "cmsa"}'
        )


def _refuse_experts_alone(model: torch.nn.Module, start: Start, config: Mapping[str, Any]) -> None:
    """Raises ValueError where ZeRO would have no parameter to train."""
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    others = [parameter for parameter in model.parameters() if id(parameter) not in start.move.owner]
    trainable = any(experts.trainable for experts in start.modules)
    if stage and trainable and not any(parameter.requires_grad for parameter in others):
        raise ValueError(
            f"nothing but experts trains, which are in pages with megascale: ZeRO {stage} needs at least one other "
            'parameter that does; leave one unfrozen, or use "zero_optimization": {"stage": 0}'
        )


def _refuse_misfit_clipping(model: torch.nn.Module, start: Start, section: Section, config: Mapping[str, Any]) -> None:
    names = [name for name, parameter in model.named_parameters() if id(parameter) not in start.move.owner]
    max_norm = float(config.get("gradient_clipping") or 0.0)
    with said_in_json():
        refuse_misfit(section.config.clip, max_norm=max_norm, names=names, modules=start.modules)

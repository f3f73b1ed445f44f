"""Checkpoints of a DeepSpeed run in the project's own format: saved under any ZeRO stage and number of ranks, loaded
under any other.

DeepSpeed's own checkpoints belong to the stage and the data-parallel size they were saved at. Here every parameter, its
fp32 master and its moments are whole tensors under the parameter's name, gathered one by one through DeepSpeed's own
functions and kept by one rank each until they are written; experts are pages, as in every checkpoint of this format.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_ext.stepping import counted_once
from megascale_omni.checkpoint import rng
from megascale_omni.checkpoint.boxes import whole
from megascale_omni.checkpoint.checkpointer import Checkpointer, Opened, RankState, SaveRequest
from megascale_omni.checkpoint.configuration import plain
from megascale_omni.checkpoint.dense import TensorPiece, whole_piece
from megascale_omni.checkpoint.opening import check_kind
from megascale_omni.checkpoint.pages import ExpertsPiece
from megascale_omni.ranks import GroupRanks

MODEL, OPTIMIZER, RNG = "model.", "optimizer.", "rng."
MOMENTS = ("exp_avg", "exp_avg_sq")
_POSITION = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


@torch.no_grad()
def save_elastic(
    engine: Any,  # noqa: ANN401 - DeepSpeed has no types
    folder: str | Path,
    *,
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Writes ``folder/tag`` (default: ``global_stepN``) and returns it when it is whole and on disk.

    ``client_state``: plain values of the script's own, given back by :func:`load_elastic`. ``keep``: newest checkpoints
    that stay (at least two; None: all). A collective of all ranks.

    Raises:
        SaveError: on every rank; what was there before is still there. ValueError: values that are not plain.
    """
    _refuse(engine)
    values = {
        "client": _plain(client_state or {}, "client_state"),
        "position": {name: int(getattr(engine, name)) for name in _POSITION},
        "schedule": None if engine.lr_scheduler is None else _plain(engine.lr_scheduler.state_dict(), "lr_scheduler"),
        "steps": _dense_steps(engine),
        "groups": [_settings(group) for group in engine.basic_optimizer.param_groups],
        "dtype": str(next(engine.module.parameters()).dtype),
        "clipping": None if engine.experts_step.clipping is None else engine.experts_step.clipping.state_dict(),
    }
    request = SaveRequest(
        tag=tag or f"global_step{engine.global_steps}",
        step=int(engine.global_steps),
        values=values,
        configuration=_configuration(engine),
        versions=_versions(),
        layout={"zero_stage": int(engine.zero_optimization_stage()), "expert": engine.run.ranks.size},
        coordinates={"expert": engine.run.ranks.rank},
    )
    state = RankState([*_pieces(engine), *_rng_pieces()], _experts_pieces(engine), engine.experts_step.adam)
    return Checkpointer(folder, ranks=GroupRanks(), keep=keep).save(state, request)


@torch.no_grad()
def load_elastic(engine: Any, folder: str | Path, *, tag: str | None = None) -> dict[str, Any] | None:  # noqa: ANN401
    """Loads the newest whole checkpoint of ``folder``, or the one named ``tag``; its client state, None without one.

    Random numbers go on on ranks that the checkpoint knows. A collective of all ranks.

    Raises:
        CheckpointError: damaged. ValueError: it does not fit this model; nothing has been loaded then.
    """
    _refuse(engine)
    checkpoints = Checkpointer(folder, ranks=GroupRanks())
    opened = checkpoints.open(tag)
    if opened is None:
        return None
    check_kind(opened, ("client", "position", "schedule", "steps", "groups"), kind="a DeepSpeed run (save_elastic)")
    values = opened.manifest.values
    _check(engine, opened)
    step = engine.experts_step
    step.gradients.drop()
    state = RankState([], _experts_pieces(engine), step.adam)
    checkpoints.load(opened, state, ignored=(MODEL, OPTIMIZER, RNG))
    _make_state(engine, int(values["steps"]))
    for name, parameter in engine.module.named_parameters():
        _load_parameter(engine, opened, name, parameter)
    engine.carried_state = _state_of_frozen(engine, opened)
    for name, buffer in _buffers(engine.module):
        buffer.copy_(opened.dense.read(MODEL + name))
    if engine.zero_optimization_stage() in (1, 2):
        engine.optimizer.update_lp_params()  # weights from masters, as at the end of a step
    if step.clipping is not None and values.get("clipping") is not None:
        step.clipping.load_state_dict(values["clipping"])
    _set_position(engine, values)
    _restore_rng(opened)
    return dict(values["client"])


def _configuration(engine: Any) -> dict[str, Any]:  # noqa: ANN401
    """What the run was configured with: the plug-in, DeepSpeed, and the model where it has a configuration."""
    model: Any = getattr(engine.module, "config", None)
    said = plain(model.to_dict() if hasattr(model, "to_dict") else model)
    return {
        "megascale": plain(engine.run.section.config),
        "deepspeed": plain(engine._config._param_dict),
        "model": plain(type(engine.module)) if said is None else said,
    }


def _versions() -> dict[str, str]:
    import deepspeed

    found = {"deepspeed": deepspeed.__version__}
    transformers = sys.modules.get("transformers")
    return found if transformers is None else {**found, "transformers": transformers.__version__}


def _set_position(engine: Any, values: Mapping[str, Any]) -> None:  # noqa: ANN401
    """Where the run stands: steps, settings of its groups, schedule.

    A checkpoint of another framework's run has no groups and no schedule: this run's own go on, at the same place.
    """
    for name, value in values["position"].items():
        setattr(engine, name, value)
    engine.run.manager.schedule.resume_at(engine.global_steps)
    if "micro_steps" not in values["position"]:
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    schedule = engine.lr_scheduler
    if values["groups"] is None:
        for _ in range(engine.global_steps - engine.skipped_steps if schedule is not None else 0):
            schedule.step()
        return
    for group, stored in zip(engine.basic_optimizer.param_groups, values["groups"], strict=True):
        group.update({key: tuple(value) if key == "betas" else value for key, value in stored.items()})
    if schedule is not None and values["schedule"] is not None:
        schedule.load_state_dict(values["schedule"])


def _refuse(engine: Any) -> None:  # noqa: ANN401
    if engine.zero_optimization_stage() == 0 and next(engine.module.parameters()).dtype is not torch.float32:
        raise ValueError(
            "elastic checkpoints without ZeRO are for fp32 only: DeepSpeed keeps no masters by name there; use "
            "zero_optimization.stage 1, 2 or 3, or engine.save_checkpoint"
        )
    if engine.experts_step is None:
        raise ValueError("the engine was made without an optimizer: there is no state to save or to go on from")


def _plain(values: Mapping[str, Any], what: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(values)))
    except TypeError as error:
        raise ValueError(f"{what} holds what JSON does not: {error}; give numbers, texts, lists and dicts") from error
    return found


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in ("lr", "weight_decay", "betas", "eps") if key in group}


# -- what there is ----------------------------------------------------------------------------------------------------


def _whole(parameter: torch.nn.Parameter, *, modifier: int | None = None) -> AbstractContextManager[Any]:
    """While it is open, a parameter that ZeRO 3 partitions is whole; what rank ``modifier`` changes stays."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([parameter], modifier_rank=modifier)
    return context


def _pieces(engine: Any) -> list[TensorPiece]:  # noqa: ANN401
    """Dense parameters and their optimizer state; each parameter's are kept by one rank. A collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pieces: list[TensorPiece] = []
    for number, (name, parameter) in enumerate(engine.module.named_parameters()):
        with _whole(parameter):
            tensors = {MODEL + name: parameter.detach().clone()} if number % size == rank else {}
        for kind, value in _state_of(engine, parameter):
            if number % size == rank and value is not None:
                tensors[f"{OPTIMIZER}{kind}.{name}"] = value.detach().clone().view(tensors[MODEL + name].shape)
        pieces += [_piece(key, tensor) for key, tensor in tensors.items()]
    pieces += [_piece(key, tensor) for key, tensor in getattr(engine, "carried_state", {}).items()]
    if rank == 0:
        pieces += [_piece(MODEL + name, buffer) for name, buffer in _buffers(engine.module)]
    return pieces


def _state_of_frozen(engine: Any, opened: Opened) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """This rank's part of the stored state of parameters that this run does not step: it saves that again."""
    frozen = {name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad}
    keys = sorted(key for key in opened.dense.tensors if key.startswith(OPTIMIZER) and key.split(".", 2)[2] in frozen)
    return {key: opened.dense.read(key) for key in keys[dist.get_rank() :: dist.get_world_size()]}


def _piece(name: str, tensor: torch.Tensor) -> TensorPiece:
    shape = tuple(tensor.shape)
    return TensorPiece(name, shape, whole(shape), tensor)


def _state_of(engine: Any, parameter: torch.nn.Parameter) -> Iterator[tuple[str, torch.Tensor | None]]:  # noqa: ANN401
    """Master and moments of a parameter, whole. A collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if not parameter.requires_grad:
        return
    stepped = bool(engine.basic_optimizer.state)
    if engine.zero_optimization():
        yield "param", safe_get_full_fp32_param(parameter) if parameter.dtype is not torch.float32 else None
        for kind in MOMENTS if stepped else ():
            yield kind, safe_get_full_optimizer_state(parameter, kind)
        return
    for kind in MOMENTS:
        yield kind, engine.basic_optimizer.state.get(parameter, {}).get(kind)


def _dense_steps(engine: Any) -> int:  # noqa: ANN401
    """Steps that the dense optimizer has made."""
    basic = engine.basic_optimizer
    counts = [state["step"] for state in basic.state.values() if "step" in state]
    counts += [group["step"] for group in basic.param_groups if "step" in group]
    return max((int(count) for count in counts), default=0)


def _buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, inner in module.named_modules():
        for name, buffer in inner._buffers.items():
            if buffer is not None and name not in inner._non_persistent_buffers_set:
                yield f"{path}.{name}".removeprefix("."), buffer


def _experts_pieces(engine: Any) -> list[ExpertsPiece]:  # noqa: ANN401
    share = counted_once(engine.run)
    return [
        ExpertsPiece(experts.path, experts, experts.owned.start, experts.all_experts, share)
        for experts in engine.modules_in_pages
    ]


def _rng_pieces() -> list[TensorPiece]:
    prefix = f"{RNG}{dist.get_rank()}."
    return [whole_piece(prefix + name, state) for name, state in rng.capture().items()]


def _restore_rng(opened: Opened) -> None:
    prefix = f"{RNG}{dist.get_rank()}."
    names = [name for name in opened.dense.tensors if name.startswith(prefix)]
    if names:
        rng.restore({name.removeprefix(prefix): opened.dense.read(name) for name in names})


# -- loading ----------------------------------------------------------------------------------------------------------


def _check(engine: Any, opened: Opened) -> None:  # noqa: ANN401
    """Refuses a checkpoint of another model before anything is loaded; the same on all ranks."""
    wanted = {MODEL + name: (_shape(p), p.dtype) for name, p in engine.module.named_parameters()}
    wanted |= {MODEL + name: (tuple(b.shape), b.dtype) for name, b in _buffers(engine.module)}
    meta = [_piece(name, torch.empty(shape, dtype=dtype, device="meta")) for name, (shape, dtype) in wanted.items()]
    problems = opened.dense.problems(meta)
    left = sorted(name for name in opened.dense.tensors if name.startswith(MODEL) and name not in wanted)
    problems += [f"has {name}, which matches nothing in this model" for name in left[:5]]
    known = {MODEL + name.split(".", 2)[2] for name in opened.dense.tensors if name.startswith(OPTIMIZER)}
    problems += [
        f"has optimizer state of {name}, which the model does not have" for name in sorted(known - set(wanted))
    ]
    groups = opened.manifest.values["groups"]
    if groups is not None and len(groups) != len(engine.basic_optimizer.param_groups):
        problems.append(f"has {len(groups)} parameter groups, the optimizer {len(engine.basic_optimizer.param_groups)}")
    if problems:
        raise ValueError(f"checkpoint {opened.folder} {'; '.join(problems[:5])}")


def _shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _make_state(engine: Any, steps: int) -> None:  # noqa: ANN401
    """Gives the dense optimizer the tensors that will be filled, and its number of steps."""
    basic = engine.basic_optimizer
    of_torch = isinstance(basic, torch.optim.Adam | torch.optim.AdamW)
    for group in basic.param_groups:
        if "step" in group:
            group["step"] = steps
    for parameter in _stepped(engine) if steps else ():
        state = basic.state[parameter]
        for kind in MOMENTS:
            if kind not in state:
                state[kind] = torch.zeros_like(parameter.detach())
        state["step"] = torch.tensor(float(steps)) if of_torch else steps
    if steps and engine.zero_optimization_stage() in (1, 2):
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def _stepped(engine: Any) -> list[torch.Tensor]:  # noqa: ANN401
    """The tensors that the dense optimizer steps; under ZeRO 3 its groups hold one only while it is stepped."""
    if engine.zero_optimization_stage() == 3:
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    return [parameter for group in engine.basic_optimizer.param_groups for parameter in group["params"]]


def _load_parameter(engine: Any, opened: Opened, name: str, parameter: torch.nn.Parameter) -> None:  # noqa: ANN401
    """A parameter, its master and its moments. A collective under ZeRO 3."""
    stored = opened.dense.tensors
    value = opened.dense.read(MODEL + name).to(parameter.device)
    with _whole(parameter, modifier=0):
        parameter.data.copy_(value.view(parameter.shape))
    if not parameter.requires_grad:
        return
    master = opened.dense.read(f"{OPTIMIZER}param.{name}") if f"{OPTIMIZER}param.{name}" in stored else value.float()
    found = {kind: opened.dense.read(key) for kind in MOMENTS if (key := f"{OPTIMIZER}{kind}.{name}") in stored}
    _set_state(engine, parameter, master, found)


def _set_state(
    engine: Any,  # noqa: ANN401
    parameter: torch.nn.Parameter,
    master: torch.Tensor,
    moments: Mapping[str, torch.Tensor],
) -> None:
    from deepspeed.utils import (
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )

    if not engine.zero_optimization():
        for kind, value in moments.items():
            engine.basic_optimizer.state[parameter][kind].copy_(value)
    elif hasattr(parameter, "ds_id"):
        safe_set_local_fp32_param(parameter, _partition(parameter, master))
        for kind, value in moments.items():
            safe_set_local_optimizer_state(parameter, _partition(parameter, value), kind)
    else:
        device = parameter.device
        safe_set_full_fp32_param(parameter, master.to(device))
        for kind, value in moments.items():
            safe_set_full_optimizer_state(parameter, value.to(device), kind)


def _partition(parameter: Any, value: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """This rank's part of a parameter under ZeRO 3; the last one is filled up with zeros."""
    size = parameter.ds_tensor.numel()
    start = size * dist.get_rank(parameter.ds_process_group)
    part = torch.zeros(size, dtype=torch.float32)
    own = value.reshape(-1)[start : start + size]
    part[: len(own)] = own
    return part.to(parameter.ds_tensor.device)

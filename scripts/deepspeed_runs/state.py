"""Weights and moments of a DeepSpeed engine by parameter name, whole on every rank, experts in pages included."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

WEIGHT, MOMENT1, MOMENT2 = "weight", "exp_avg", "exp_avg_sq"
KINDS = (WEIGHT, MOMENT1, MOMENT2)
State = dict[str, dict[str, torch.Tensor]]
"""Parameter name -> kind -> fp32 tensor in the parameter's shape."""


def read_state(engine: Any) -> State:  # noqa: ANN401 - DeepSpeed has no types
    """What the engine holds; before its first step there are no moments. A collective of all ranks."""
    return {**_read_dense(engine), **_read_experts(engine)}


def write_state(engine: Any, state: State) -> None:  # noqa: ANN401
    """Sets weights (masters and model) and moments of an engine that has made at least one step. A collective."""
    for name, parameter in engine.module.named_parameters():
        for kind, value in state[name].items():
            _write_dense(engine, parameter, kind, value)
    _publish(engine)
    _write_experts(engine, state)


def _read_dense(engine: Any) -> State:  # noqa: ANN401
    found: State = {}
    for name, parameter in engine.module.named_parameters():
        found[name] = {}
        for kind in KINDS:
            value = _dense_tensor(engine, parameter, kind)
            if value is not None:
                found[name][kind] = value.detach().float().clone()
    return found


def _dense_tensor(engine: Any, parameter: torch.nn.Parameter, kind: str) -> torch.Tensor | None:  # noqa: ANN401
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if engine.zero_optimization():
        if kind == WEIGHT:
            return safe_get_full_fp32_param(parameter)  # type: ignore[no-any-return]
        if not engine.basic_optimizer.state:
            return None
        return safe_get_full_optimizer_state(parameter, kind)  # type: ignore[no-any-return]
    master = _master(engine, parameter)
    if kind == WEIGHT:
        return master
    value: torch.Tensor | None = engine.basic_optimizer.state.get(master, {}).get(kind)
    return value


def _master(engine: Any, parameter: torch.nn.Parameter) -> torch.Tensor:  # noqa: ANN401
    """ZeRO 0: the tensor that the optimizer steps."""
    groups = getattr(engine.optimizer, "fp32_groups", None)
    if groups is None:
        return parameter
    for masters, parameters in zip(groups, engine.optimizer.fp16_groups, strict=True):
        for master, candidate in zip(masters, parameters, strict=True):
            if candidate is parameter:
                return master  # type: ignore[no-any-return]
    raise RuntimeError("the optimizer does not hold this parameter")


def _write_dense(engine: Any, parameter: torch.nn.Parameter, kind: str, value: torch.Tensor) -> None:  # noqa: ANN401
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    if engine.zero_optimization():
        if kind == WEIGHT:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, kind)
        return
    master = _master(engine, parameter)
    target = master if kind == WEIGHT else engine.basic_optimizer.state[master][kind]
    target.data.copy_(value)
    if kind == WEIGHT and master is not parameter:
        parameter.data.copy_(value)


def _publish(engine: Any) -> None:  # noqa: ANN401
    """ZeRO 1 and 2 keep weights whole beside the partitioned masters."""
    if engine.zero_optimization_stage() in (1, 2):
        engine.optimizer.update_lp_params()


def _modules(engine: Any) -> list[Any]:  # noqa: ANN401
    return getattr(engine, "modules_in_pages", [])


def _planes(experts: Any) -> dict[str, Any]:  # noqa: ANN401
    from megascale_omni.optimizer.state_tensors import master_plane
    from megascale_omni.paging.planes import Plane

    return {WEIGHT: master_plane(experts), MOMENT1: Plane.MOMENT1, MOMENT2: Plane.MOMENT2}


def _read_experts(engine: Any) -> State:  # noqa: ANN401
    found: State = {}
    for experts in _modules(engine):
        adam = engine.experts_step.adam
        adam.catch_up_all()
        for kind, plane in _planes(experts).items():
            for name, value in _of_all_ranks(experts, adam.tensors.dense(experts, plane)).items():
                found.setdefault(f"{experts.path}.{name}", {})[kind] = value.float()
    return found


def _of_all_ranks(experts: Any, local: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """Tensors of all experts of a module, where ranks divide them. A collective."""
    ranks = experts.run.ranks
    if ranks.size == 1:
        return local
    parts: list[dict[str, torch.Tensor]] = [{}] * ranks.size
    dist.all_gather_object(parts, local, group=ranks.parallel)
    return {name: torch.cat([part[name] for part in parts]) for name in local}


def _write_experts(engine: Any, state: State) -> None:  # noqa: ANN401
    for experts in _modules(engine):
        adam = engine.experts_step.adam
        adam.catch_up_all()
        names = [tensor.name for tensor in experts.names.tensors()]
        owned = slice(experts.owned.start, experts.owned.stop)
        for kind, plane in _planes(experts).items():
            tensors = {name: state[f"{experts.path}.{name}"][kind][owned] for name in names}
            adam.tensors.load_dense(experts, plane, tensors)
            if kind == WEIGHT:
                experts.load_dense(tensors)

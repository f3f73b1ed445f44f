"""Checkpoints of a model and a torch optimizer, without a training framework.

Every rank has the whole of the dense parameters (as under DistributedDataParallel); experts may be divided: module
``experts`` with ``first_expert`` and ``num_global_experts`` attributes says which of them are here, otherwise they are
whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megascale_omni import ranks as ranks_of
from megascale_omni.checkpoint import rng
from megascale_omni.checkpoint.boxes import whole
from megascale_omni.checkpoint.checkpointer import Checkpointer, Opened, RankState, SaveRequest
from megascale_omni.checkpoint.configuration import plain
from megascale_omni.checkpoint.dense import TensorPiece, whole_piece
from megascale_omni.checkpoint.opening import check_kind
from megascale_omni.checkpoint.pages import ExpertsPiece
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.shards import PageShards
from megascale_omni.optimizer.paged_adam import PagedAdam
from megascale_omni.ranks import Ranks


@dataclass(frozen=True)
class Training:
    """What a run trains: the model, the dense parameters' optimizer, the experts' optimizer (None where absent)."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None = None
    adam: PagedAdam | None = None


def save_checkpoint(
    checkpoint_dir: str | Path,
    tag: str,
    training: Training,
    *,
    step: int,
    include_optimizer: bool = True,
    include_rng_state: bool = True,
    values: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Writes ``<checkpoint_dir>/<tag>/`` and returns it when it is whole and on disk. A collective of all ranks.

    ``step``: steps made so far. ``values``: plain values of the run's own (data position, schedule), given back by
    :func:`load_checkpoint`. ``keep``: newest checkpoints that stay (at least two; None: all).

    Raises:
        SaveError: on every rank; what was there before is still there.
    """
    ranks = ranks_of.of_run()
    tensors = _model_pieces(training, ranks)
    groups: list[dict[str, Any]] = []
    if include_optimizer and training.optimizer is not None:
        tensors += _optimizer_pieces(training, training.optimizer, ranks)
        groups = [{k: v for k, v in g.items() if k != "params"} for g in training.optimizer.param_groups]
    if include_rng_state:
        tensors += _rng_pieces(ranks.rank)
    request = SaveRequest(
        tag=tag,
        step=step,
        values={"run": dict(values or {}), "groups": groups, "optimizer": include_optimizer, "rng": include_rng_state},
        configuration=_configuration(training),
        include_optimizer=include_optimizer,
    )
    state = RankState(tensors, _experts_pieces(training, ranks), training.adam)
    return Checkpointer(checkpoint_dir, ranks=ranks, keep=keep).save(state, request)


def load_checkpoint(
    checkpoint_dir: str | Path,
    training: Training,
    *,
    tag: str | None = None,
    include_optimizer: bool = True,
    include_rng_state: bool = True,
) -> tuple[int, dict[str, Any]] | None:
    """Loads the newest whole checkpoint, or the one named ``tag``, in place: its step and values; None without one.

    Random numbers continue on ranks that the checkpoint knows; others keep theirs. A collective of all ranks.

    Raises:
        CheckpointError: damaged. ValueError: it does not fit this model or optimizer; nothing is loaded then.
    """
    ranks = ranks_of.of_run()
    checkpoints = Checkpointer(checkpoint_dir, ranks=ranks)
    opened = checkpoints.open(tag)
    if opened is None:
        return None
    check_kind(opened, ("run", "groups", "optimizer"), kind="save_checkpoint")
    values = opened.manifest.values
    tensors = _model_pieces(training, ranks)
    optimizer = training.optimizer if include_optimizer else None
    if include_optimizer and not values["optimizer"]:
        raise ValueError(f"checkpoint {opened.folder} has no optimizer state: load it with include_optimizer=False")
    if optimizer is not None:
        _make_state(training, optimizer, opened)
        tensors += _optimizer_pieces(training, optimizer, ranks)
    state = RankState(tensors, _experts_pieces(training, ranks), training.adam)
    ignored = () if include_optimizer else ("optimizer.",)
    checkpoints.load(opened, state, with_optimizer=include_optimizer, ignored=("rng.", *ignored))
    if optimizer is not None:
        for group, stored in zip(optimizer.param_groups, values["groups"], strict=True):
            group.update({k: tuple(v) if k == "betas" else v for k, v in stored.items()})
    if include_rng_state and f"rng.{ranks.rank}.{rng.TORCH}" in opened.dense.tensors:
        prefix = f"rng.{ranks.rank}."
        names = [name for name in opened.dense.tensors if name.startswith(prefix)]
        rng.restore({name.removeprefix(prefix): opened.dense.read(name) for name in names})
    return opened.manifest.step, dict(values["run"])


def _configuration(training: Training) -> dict[str, Any]:
    """What there is to say of a run without a framework's configuration."""
    adam = training.adam
    return {
        "model": plain(type(training.model)),
        "optimizer": None if training.optimizer is None else plain(type(training.optimizer)),
        "experts": None if adam is None else {"arithmetic": adam.arithmetic.name, "max_lag": adam.max_lag},
    }


def _model_pieces(training: Training, ranks: Ranks) -> list[TensorPiece]:
    named = {**dict(training.model.named_parameters()), **_persistent_buffers(training.model)}
    return [_piece(f"model.{name}", tensor, ranks) for name, tensor in named.items()]


def _piece(name: str, tensor: torch.Tensor, ranks: Ranks) -> TensorPiece:
    shape = tuple(tensor.shape)
    return TensorPiece(name, shape, whole(shape), tensor.detach(), writes=ranks.rank == 0)


def _persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{path}.{name}".removeprefix(".")] = buffer
    return found


def _names(training: Training) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in training.model.named_parameters()}


def _optimizer_pieces(training: Training, optimizer: torch.optim.Optimizer, ranks: Ranks) -> list[TensorPiece]:
    names = _names(training)
    pieces = []
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                pieces.append(_piece(f"optimizer.{key}.{names[parameter]}", value, ranks))
    return pieces


def _make_state(training: Training, optimizer: torch.optim.Optimizer, opened: Opened) -> None:
    """Gives parameters the state tensors that the checkpoint has, to be filled."""
    stored, own = opened.manifest.values["groups"], optimizer.param_groups
    if len(stored) != len(own):
        raise ValueError(f"checkpoint {opened.folder} has {len(stored)} parameter groups, the optimizer {len(own)}")
    keys: dict[str, set[str]] = {}
    for stored_name in opened.dense.tensors:
        if stored_name.startswith("optimizer."):
            _, key, name = stored_name.split(".", 2)
            keys.setdefault(name, set()).add(key)
    for parameter, name in _names(training).items():
        for key in keys.get(name, set()):
            if key not in optimizer.state[parameter]:
                like = torch.zeros(()) if key == "step" else torch.zeros_like(parameter.detach())
                optimizer.state[parameter][key] = like


def _rng_pieces(rank: int) -> list[TensorPiece]:
    return [whole_piece(f"rng.{rank}.{name}", state) for name, state in rng.capture().items()]


def _experts_pieces(training: Training, ranks: Ranks) -> list[ExpertsPiece]:
    pieces = []
    for path, module in training.model.named_modules():
        if isinstance(module, PagedExperts):
            first = int(getattr(module, "first_expert", 0))
            count = int(getattr(module, "num_global_experts", module.num_experts))
            pieces.append(ExpertsPiece(path, module, first, count, PageShards()))
    return _shared(pieces, training, ranks)


def _shared(pieces: list[ExpertsPiece], training: Training, ranks: Ranks) -> list[ExpertsPiece]:
    """Divides the saving among the ranks that hold the same experts, or leaves it to the optimizer's shards."""
    if training.adam is not None and training.adam.shards.size > 1:
        return [ExpertsPiece(p.path, p.experts, p.first_expert, p.num_experts, training.adam.shards) for p in pieces]
    held = ranks.gather([(p.path, p.first_expert) for p in pieces])
    result = []
    for piece in pieces:
        holders = [rank for rank, names in enumerate(held) if (piece.path, piece.first_expert) in names]
        share = PageShards(rank=holders.index(ranks.rank), size=len(holders))
        result.append(ExpertsPiece(piece.path, piece.experts, piece.first_expert, piece.num_experts, share))
    return result

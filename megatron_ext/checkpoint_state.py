"""A Megatron run's state as a checkpoint stores it: dense tensors under stock's keys, experts under global paths.

[Note: keys of stock]
Stock's sharded state dict names every tensor of the model independently of pipeline, tensor and virtual stages, and
says where a rank's part of it lies. Dense parameters, their masters and moments are stored under these keys; how the
optimizer groups or flattens them is not stored, so that another layout and the other kind of optimizer find them again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.transformer.transformer_layer import TransformerLayer

from megascale_omni.checkpoint import rng
from megascale_omni.checkpoint.boxes import Box, boxes_of_range, whole
from megascale_omni.checkpoint.configuration import plain
from megascale_omni.checkpoint.dense import DenseIndex, TensorPiece, whole_piece
from megascale_omni.checkpoint.pages import ExpertsPiece
from megascale_omni.experts.shards import PageShards
from megatron_ext import patches
from megatron_ext.chained_optimizer import MegaScaleChainedOptimizer
from megatron_ext.distributed import MegaScaleDDP
from megatron_ext.experts import MegaScaleExperts

MODEL, OPTIMIZER, RNG, OBJECT = "model.", "optimizer.", "rng.", "object."
EXPERT_TRACKER = "expert-parallel-rng"


@dataclass(frozen=True)
class KeyPlace:
    """Where a part of a local tensor (``local``) lies in the global tensor ``key`` (``box``)."""

    key: str
    global_shape: tuple[int, ...]
    box: Box
    local: Box
    main: bool
    main_but_for_data: bool

    @property
    def prepended(self) -> int:
        """Dimensions (of layers) that the global tensor has before those of the local one."""
        return len(self.box.shape) - len(self.local.shape)


@dataclass(frozen=True)
class OptimizerEntry:
    """State of one parameter: tensors by name, of the whole parameter or of its elements from ``start`` on."""

    parameter: torch.Tensor
    tensors: Mapping[str, torch.Tensor]
    start: int | None = None


def model_places(
    chunks: Sequence[MegaScaleDDP],
) -> tuple[list[tuple[torch.Tensor, list[KeyPlace]]], list[TensorPiece]]:
    """Every dense tensor of the chunks with the places of its parts; and markers of what stock stores empty.

    Stock looks for an object without content of every parallel linear layer. A marker says that there is one.

    Raises:
        ValueError: state that is no tensor (Transformer Engine's extra state).
    """
    metadata = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    found, markers = [], []
    for chunk in chunks:
        with ExitStack() as stack:
            for experts in chunk.paged_experts:
                stack.enter_context(experts.left_out())
            sharded = innermost(chunk).sharded_state_dict(metadata=metadata)
        for value in nested_values(sharded):
            if isinstance(value, ShardedObject):
                if value.data is not None and not _is_empty(value.data):
                    raise ValueError(
                        f"{value.key} is not a tensor and cannot be saved in the paged format; use stock's"
                    )
                if not any(value.replica_id if isinstance(value.replica_id, tuple) else (value.replica_id,)):
                    markers.append(TensorPiece(OBJECT + value.unique_key, (0,), whole((0,)), torch.empty(0)))
            elif isinstance(value, ShardedTensor | ShardedTensorFactory):
                found.append((value.data, _places(value)))
    return found, markers


def innermost(module: Any) -> Any:  # noqa: ANN401 - stock's wrappers
    """The model inside stock's wrappers."""
    while hasattr(module, "module"):
        module = module.module
    return module


def _is_empty(data: object) -> bool:
    return (isinstance(data, torch.Tensor) and not data.numel()) or getattr(data, "getbuffer", bytes)() == b""


def _places(value: ShardedTensor | ShardedTensorFactory) -> list[KeyPlace]:
    shape = tuple(value.data.shape)
    if isinstance(value, ShardedTensor):
        return [_place(value, whole(shape))]
    # A factory cuts a tensor into several; where its cuts lie is seen on a tensor without memory.
    probe = torch.empty(shape, device="meta", dtype=value.data.dtype)
    parts = nested_values({"parts": value.build_fn(value.key, probe, value.replica_id, None)})
    result = []
    for part in parts:
        offset, rest = [], int(part.data.storage_offset())
        for stride in probe.stride():
            offset.append(rest // stride)
            rest %= stride
        result.append(_place(part, Box(tuple(offset), tuple(part.local_shape))))
    return result


def _place(value: ShardedTensor, local: Box) -> KeyPlace:
    shape = (*(1,) * value.prepend_axis_num, *value.local_shape)
    replica = value.replica_id if isinstance(value.replica_id, tuple) else (value.replica_id,)
    return KeyPlace(
        value.key,
        tuple(value.global_shape),
        Box(tuple(value.global_offset), shape),
        local,
        main=not any(replica),
        main_but_for_data=not any(replica[:-1]),
    )


def model_pieces(places: Sequence[tuple[torch.Tensor, list[KeyPlace]]]) -> list[TensorPiece]:
    """Parameters and persistent buffers."""
    return [
        piece
        for tensor, of_tensor in places
        for piece in _pieces(MODEL, of_tensor, tensor.detach(), live=isinstance(tensor, torch.nn.Parameter))
    ]


def _pieces(
    prefix: str, places: Sequence[KeyPlace], tensor: torch.Tensor, *, start: int | None = None, live: bool = True
) -> Iterator[TensorPiece]:
    """The pieces of a local tensor, or of its flattened elements from ``start`` on."""
    shape = tuple(max(p.local.offset[d] + p.local.shape[d] for p in places) for d in range(len(places[0].local.shape)))
    boxes = [whole(shape)] if start is None else boxes_of_range(shape, start, start + tensor.numel())
    position = 0
    for box in boxes:
        part = tensor.view(-1)[position : position + box.numel].view(box.shape) if start is not None else tensor
        position += box.numel
        for place in places:
            common = box.overlap(place.local)
            if common is None:
                continue
            inner = common.within(place.local)
            lead = place.prepended
            offset = tuple(a + b for a, b in zip(place.box.offset, (*(0,) * lead, *inner.offset), strict=True))
            view = part[common.within(box).slices][(None,) * lead]
            writes = place.main if start is None else place.main_but_for_data
            name = prefix + place.key
            global_box = Box(offset, (*(1,) * lead, *inner.shape))
            yield TensorPiece(name, place.global_shape, global_box, view, writes=writes, live=live)


def optimizer_pieces(
    optimizer: MegaScaleChainedOptimizer,
    places: Sequence[tuple[torch.Tensor, list[KeyPlace]]],
    *,
    stored: DenseIndex | None = None,
) -> list[TensorPiece]:
    """Masters, moments and steps of the dense optimizers.

    With ``stored`` parameters get (zero) state where it is stored, to be loaded into, and lose it where it is not.
    """
    by_parameter = {id(tensor): of_tensor for tensor, of_tensor in places}
    pieces = []
    for entry in _entries(optimizer, by_parameter, stored):
        of_parameter = by_parameter[id(entry.parameter)]
        for name, tensor in entry.tensors.items():
            if name == "step":
                pieces.append(_step_piece(of_parameter[0], tensor, entry.start))
            else:
                pieces += _pieces(f"{OPTIMIZER}{name}.", of_parameter, tensor.detach(), start=entry.start)
    return pieces


def addresses(optimizer: MegaScaleChainedOptimizer) -> tuple[int, ...]:
    """Where the parameters and the state of the dense optimizers lie: pieces of them hold as long as it is the same.

    Pieces keep the memory that they are of, so that no other tensor gets its address.
    """
    found: list[int] = []
    for member in optimizer.dense.chained_optimizers:
        if member.is_stub_optimizer or member.optimizer is None:
            continue
        state = member.optimizer.state
        for parameter, main, start in _parameters(member):
            found += (parameter.data_ptr(), main.data_ptr(), -1 if start is None else start)
            found += [tensor.data_ptr() for tensor in state[main].values()] if main in state else []
    return tuple(found)


def _step_piece(place: KeyPlace, step: torch.Tensor, start: int | None) -> TensorPiece:
    lead = place.prepended or 1
    box = Box(place.box.offset[:lead] if place.prepended else (0,), (1,) * lead)
    shape = place.global_shape[:lead] if place.prepended else (1,)
    first = not any(place.box.offset[place.prepended :])  # of the ranks that tensor parallelism cuts it for
    writes = first and (place.main if start is None else place.main_but_for_data and start == 0)
    name = f"{OPTIMIZER}step.{place.key}"
    return TensorPiece(name, shape, box, step.detach().view((1,) * lead), writes=writes, live=False)


def _entries(
    optimizer: MegaScaleChainedOptimizer, by_parameter: Mapping[int, list[KeyPlace]], stored: DenseIndex | None
) -> Iterator[OptimizerEntry]:
    for member in optimizer.dense.chained_optimizers:
        if member.is_stub_optimizer or member.optimizer is None:
            continue
        for parameter, main, start in _parameters(member):
            if id(parameter) not in by_parameter:
                raise RuntimeError(f"a parameter of shape {tuple(parameter.shape)} is not in the model's state dict")
            state = member.optimizer.state
            if stored is not None:
                _make_state(state, main, has=_has(stored, "exp_avg", by_parameter[id(parameter)]))
            tensors = dict(state[main]) if main in state else {}
            if _is_master(main, parameter) and (stored is None or not _is_fresh(stored, by_parameter[id(parameter)])):
                tensors["param"] = main
            yield OptimizerEntry(parameter, tensors, start)


def _has(stored: DenseIndex, kind: str, places: Sequence[KeyPlace]) -> bool:
    """Whether a kind of state of a parameter is stored; it is not where the parameter was frozen, or not used yet."""
    return any(stored.holds(f"{OPTIMIZER}{kind}.{place.key}", place.box, all_of_it=False) for place in places)


def _is_master(main: torch.Tensor, parameter: torch.Tensor) -> bool:
    return main.data_ptr() != parameter.data_ptr() and main.dtype != parameter.dtype


def _is_fresh(stored: DenseIndex, places: Sequence[KeyPlace]) -> bool:
    """Whether nothing that an optimizer has of a parameter is stored: it was frozen from the beginning."""
    return not any(_has(stored, kind, places) for kind in ("param", "exp_avg"))


def fresh_masters(
    optimizer: MegaScaleChainedOptimizer,
    places: Sequence[tuple[torch.Tensor, list[KeyPlace]]],
    *,
    stored: DenseIndex,
) -> Callable[[], None]:
    """Makes masters of parameters that were frozen when they were saved, from weights that have been loaded."""
    by_parameter = {id(tensor): of_tensor for tensor, of_tensor in places}
    members = [m for m in optimizer.dense.chained_optimizers if not m.is_stub_optimizer and m.optimizer is not None]
    fresh = [
        found
        for member in members
        for found in _parameters(member)
        if _is_master(found[1], found[0]) and _is_fresh(stored, by_parameter[id(found[0])])
    ]

    def make() -> None:
        for parameter, main, start in fresh:
            first = start or 0
            main.data.view(-1).copy_(parameter.detach().view(-1)[first : first + main.numel()])

    return make


def _parameters(member: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, int | None]]:  # noqa: ANN401 - stock's
    """(parameter of the model, what the optimizer steps, start of its range or None) of a dense optimizer."""
    if isinstance(member, DistributedOptimizer):
        for parameter, (group, order) in member.model_param_group_index_map.items():
            main = member.optimizer.param_groups[group]["params"][order]
            yield parameter, main, member._get_model_param_range_map(parameter)["param"].start
        return
    if isinstance(member, Float16OptimizerWithFloat16Params):
        for low, high in zip(member.float16_groups, member.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(low, high, strict=True):
                yield parameter, main, None
        for group in member.fp32_from_fp32_groups:
            for parameter in group:
                yield parameter, parameter, None
        return
    for group in member.optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter, parameter, None


def _make_state(state: dict[Any, Any], main: torch.Tensor, *, has: bool) -> None:
    if not has:
        state.pop(main, None)
    elif not state.get(main):
        zeros = {key: torch.zeros_like(main.detach(), dtype=torch.float32) for key in ("exp_avg", "exp_avg_sq")}
        state[main] = {"step": torch.zeros((), dtype=torch.float32), **zeros}


def experts_pieces(chunks: Sequence[MegaScaleDDP], optimizer: MegaScaleChainedOptimizer) -> list[ExpertsPiece]:
    """The paged experts of all chunks."""
    shards = optimizer.paged.adam.shards
    pieces = []
    for chunk in chunks:
        group = chunk.expt_dp_group
        share = shards if shards.size > 1 else PageShards(rank=group.rank(), size=group.size())
        for path, experts in _global_paths(innermost(chunk)):
            where = (experts.numbers[0], experts.num_global_experts, share, experts.numbers)
            neurons = (experts.first_neuron, experts.neurons_of_all)
            pieces.append(ExpertsPiece(path, experts, *where, *neurons))
    return pieces


def _global_paths(model: torch.nn.Module) -> Iterator[tuple[str, MegaScaleExperts]]:
    """Paths in the whole model: layers are numbered over all stages."""
    layers = {name: m.layer_number for name, m in model.named_modules() if isinstance(m, TransformerLayer)}
    for path, module in model.named_modules():
        if isinstance(module, MegaScaleExperts):
            for name, number in layers.items():
                if path.startswith(name + ".") and re.fullmatch(r"decoder\.layers\.\d+", name):
                    path = f"decoder.layers.{number - 1}{path[len(name) :]}"
                    break
            yield path, module


def coordinates() -> dict[str, int]:
    """This rank's place in the layout."""
    return {
        "pipeline": parallel_state.get_pipeline_model_parallel_rank(),
        "tensor": parallel_state.get_tensor_model_parallel_rank(),
        "data": parallel_state.get_data_parallel_rank(with_context_parallel=True),
        "expert": parallel_state.get_expert_model_parallel_rank(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_rank(),
    }


def layout() -> dict[str, int]:
    """Parallel sizes."""
    return {
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def configuration(chunks: Sequence[MegaScaleDDP], optimizer: MegaScaleChainedOptimizer) -> dict[str, Any]:
    """What the run was configured with: the plug-in, stock's model, its data parallelism, its optimizer."""
    return {
        "megascale": plain(patches.active_runtime().config),
        "model": plain(innermost(chunks[0]).config),
        "data_parallel": plain(chunks[0].ddp_config),
        "optimizer": plain(optimizer.config),
    }


def _rng_prefix(data: int) -> str:
    at = coordinates()
    return f"{RNG}pp{at['pipeline']}.tp{at['tensor']}.dp{data}."


def rng_pieces() -> list[TensorPiece]:
    """All random number states of this rank."""
    prefix = _rng_prefix(coordinates()["data"])
    trackers = {f"tracker.{k}": v for k, v in tensor_parallel.get_cuda_rng_tracker().get_states().items()}
    return [whole_piece(prefix + name, state) for name, state in {**rng.capture(), **trackers}.items()]


def restore_rng(dense: DenseIndex, saved: Mapping[str, int]) -> str | None:
    """Goes on with the stored random numbers; what could not be restored in this layout, and why, as a text.

    Data-parallel ranks draw alike, so that one more or less takes the first one's. Experts' own numbers belong to an
    expert-parallel rank.
    """
    here = layout()
    if any(saved[name] != here[name] for name in ("pipeline", "tensor")):
        return "random numbers begin anew: they belong to pipeline and tensor ranks, which are others now"
    data = coordinates()["data"]
    if f"{_rng_prefix(data)}{rng.TORCH}" not in dense.tensors:
        data = 0
    prefix = _rng_prefix(data)
    states = {n.removeprefix(prefix): dense.read(n) for n in dense.tensors if n.startswith(prefix)}
    if not states:
        return "random numbers begin anew: the checkpoint has none"
    rng.restore(states)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    known = {n.removeprefix("tracker."): s for n, s in states.items() if n.startswith("tracker.")}
    lost = None
    if any(saved.get(name, 1) != here[name] for name in ("expert", "expert_tensor")):
        known.pop(EXPERT_TRACKER, None)
        lost = "experts' random numbers begin anew: they belong to expert-parallel ranks, which are others now"
    tracker.set_states({**tracker.get_states(), **known})
    return lost

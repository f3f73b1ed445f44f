"""A plain Hugging Face checkpoint of a model in training, written layer by layer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_ext.checkpoint import hidden
from megascale_omni.checkpoint.pages_file import write_durably
from megascale_omni.ranks import all_or_none

Tensors = dict[str, torch.Tensor]


@torch.no_grad()
def export_hf(engine: Any, folder: str | Path) -> None:  # noqa: ANN401 - DeepSpeed has no types
    """Writes the model as ``from_pretrained`` reads it: configuration, weights in the training dtype, index.

    One module's experts are in memory at a time; other weights are gathered one by one under ZeRO 3. A collective of
    all ranks; the first one writes.

    Raises:
        RuntimeError: on every rank, where the first one could not write.
    """
    writer = _Writer(Path(folder), engine.module) if dist.get_rank() == 0 else None
    problem: Exception | None = None
    for tensors in _chunks(engine):
        if writer is not None and problem is None:
            try:
                writer.add(tensors)
            except Exception as error:  # told at the end: gathering goes on, it needs every rank
                problem = error

    def close() -> None:
        if problem is not None:
            raise problem
        if writer is not None:
            writer.close()

    all_or_none(close, kind=RuntimeError, doing=f"exporting to {folder}")


def _chunks(engine: Any) -> Iterator[Tensors]:  # noqa: ANN401
    """The model's tensors under the names of its modules, a part at a time."""
    yield _dense(engine)
    for experts in engine.modules_in_pages:
        yield {f"{experts.path}.{name}": tensor.cpu() for name, tensor in experts.gathered().items()}


def _dense(engine: Any) -> Tensors:  # noqa: ANN401
    tied = set(getattr(engine.module, "all_tied_weights_keys", None) or {})
    with hidden(engine.run):
        found = {name: value for name, value in engine.module.state_dict().items() if name not in tied}
    import deepspeed

    parameters = dict(engine.module.named_parameters())
    tensors: Tensors = {}
    for name, value in found.items():
        parameter = parameters.get(name)
        partitioned = parameter is not None and hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter]) if partitioned else nullcontext():
            whole_value = parameter.data if partitioned else value  # type: ignore[union-attr]
            if dist.get_rank() == 0:
                tensors[name] = whole_value.detach().to("cpu", copy=True)
    return tensors


class _Writer:
    """Files of one checkpoint; one a chunk."""

    def __init__(self, folder: Path, model: Any) -> None:  # noqa: ANN401 - a PreTrainedModel
        self._folder, self._model = folder, model
        self._files: list[tuple[Path, list[str]]] = []
        self._bytes = 0

    def add(self, tensors: Tensors) -> None:
        """Writes a chunk under the names that published checkpoints have."""
        from safetensors.torch import save
        from transformers.core_model_loading import revert_weight_conversion

        self._folder.mkdir(parents=True, exist_ok=True)
        named = {name: t.contiguous().clone() for name, t in revert_weight_conversion(self._model, tensors).items()}
        path = self._folder / f"model-{len(self._files) + 1:05}.safetensors.new"
        write_durably(path, save(named, metadata={"format": "pt"}))
        self._files.append((path, list(named)))
        self._bytes += sum(tensor.numel() * tensor.element_size() for tensor in named.values())

    def close(self) -> None:
        """Configuration and index; files get their names."""
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._files, start=1):
            name = f"model-{number:05}-of-{len(self._files):05}.safetensors"
            path.rename(self._folder / name)
            weight_map.update(dict.fromkeys(names, name))
        self._model.config.save_pretrained(self._folder)
        if getattr(self._model, "generation_config", None) is not None:
            self._model.generation_config.save_pretrained(self._folder)
        index = {"metadata": {"total_size": self._bytes}, "weight_map": weight_map}
        write_durably(self._folder / "model.safetensors.index.json", json.dumps(index, indent=1).encode())

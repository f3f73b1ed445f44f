"""Checkpoints into DeepSpeed's universal format, which stock DeepSpeed loads under ZeRO 1, 2 and 3 on any ranks.

    FOLDER/latest_universal                                 the newest tag
    FOLDER/TAG/[zero_pp_rank_0_]mp_rank_00_model_states.pt  position, schedule, client state
    FOLDER/TAG/zero/optimizer_state.pt                      settings of the parameter groups, steps
    FOLDER/TAG/zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt

A run loads it with ``"checkpoint": {"load_universal": true}`` in its configuration. Weights are rounded from the
masters there, as every step does. DeepSpeed reads neither buffers nor frozen parameters from it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megascale_omni.checkpoint.assemble import Source
from megascale_omni.checkpoint.deepspeed_files import LATEST_UNIVERSAL
from megascale_omni.checkpoint.filesystem import LocalFileSystem, write_file
from megascale_omni.checkpoint.hf_view import HfView, hf_view
from megascale_omni.checkpoint.megatron_keys import MODEL, MOMENTS, OPTIMIZER
from megascale_omni.checkpoint.opening import Opened
from megascale_omni.paging.planes import Plane

_VERSION = "0.19.8"
"""Of DeepSpeed, whose layout of the files this is."""
_MOST_GROUPS = 256
_FILES = {"fp32": Plane.MASTER, MOMENTS[0]: Plane.MOMENT1, MOMENTS[1]: Plane.MOMENT2}


def to_deepspeed(opened: Opened, target: Path, *, tag: str | None = None) -> Path:
    """Adds ``target/tag`` (default ``global_stepN``) to a folder of DeepSpeed's checkpoints.

    Raises:
        ValueError: no optimizer state, tensors that have no place in a Hugging Face model, or a tag that is there.
    """
    view = hf_view(opened)
    if not view.steps or opened.pages.num_steps is None:
        raise ValueError(
            f"checkpoint {opened.folder} has no optimizer state, without which DeepSpeed does not load its universal "
            "format: convert it --to hf"
        )
    name = tag or f"global_step{opened.manifest.step}"
    final = target / name
    if final.exists():
        raise ValueError(f"{final} exists; give another folder, or another --tag")
    files = LocalFileSystem()
    target.mkdir(parents=True, exist_ok=True)
    draft = target / f".draft-{name}"
    if draft.exists():
        files.remove(draft)
    for folder in (draft, draft / "zero"):
        files.make_folder(folder)
    for parameter, states in _parameters(view):
        files.make_folder(draft / "zero" / parameter)
        for kind, source in states.items():
            _save(files, draft / "zero" / parameter / f"{kind}.pt", {"param": source.read()})
        if len(states) > 1:
            _save(files, draft / "zero" / parameter / "step.pt", float(view.steps))
        files.sync_folder(draft / "zero" / parameter)
    _save(files, draft / "zero" / "optimizer_state.pt", _optimizer(view))
    for prefix in ("", "zero_pp_rank_0_"):  # names under ZeRO 1 and 2, and under ZeRO 3
        _save(files, draft / f"{prefix}mp_rank_00_model_states.pt", _model(view))
    for folder in (draft / "zero", draft):
        files.sync_folder(folder)
    files.rename(draft, final)
    part = target / f".{LATEST_UNIVERSAL}.part"
    if part.exists():
        files.remove(part)
    write_file(files, part, name.encode())
    files.rename(part, target / LATEST_UNIVERSAL)
    files.sync_folder(target)
    return final


def _save(files: LocalFileSystem, path: Path, value: object) -> None:
    data = io.BytesIO()
    torch.save(value, data)
    write_file(files, path, data.getbuffer())


def _parameters(view: HfView) -> Iterator[tuple[str, dict[str, Source]]]:
    """Every parameter's weights and moments in fp32; of those that no step has changed weights alone."""
    for name, source in view.dense.items():
        if not name.startswith(MODEL):
            continue
        parameter = name.removeprefix(MODEL)
        weights = view.dense.get(f"{OPTIMIZER}param.{parameter}", _as_fp32(source))
        states = {"fp32": weights}
        states |= {m: view.dense[key] for m in MOMENTS if (key := f"{OPTIMIZER}{m}.{parameter}") in view.dense}
        yield parameter, states
    for path, stored in view.modules.items():
        frozen = view.opened.pages.modules[stored].histories == (None, None)
        kinds = list(_FILES.items())[: 1 if frozen else None]
        of_planes = {kind: dict(view.experts(path, plane)) for kind, plane in kinds}
        for name in of_planes["fp32"]:
            yield f"{path}.{name}", {kind: sources[name] for kind, sources in of_planes.items()}


def _as_fp32(source: Source) -> Source:
    return Source(torch.float32, source.shape, lambda: source.read().float())


def _optimizer(view: HfView) -> dict[str, Any]:
    groups = [{**_tuples(group), "params": [n]} for n, group in enumerate(_groups(view))]
    return {
        "ds_version": _VERSION,
        "overflow": False,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": float(view.steps)}}, "param_groups": groups},
    }


def _groups(view: HfView) -> list[Mapping[str, Any]]:
    """Settings of a DeepSpeed run's groups; of another's none, often enough: DeepSpeed passes over groups without."""
    stored = view.opened.manifest.values.get("groups") if "client" in view.opened.manifest.values else None
    return stored or [{}] * _MOST_GROUPS


def _tuples(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}


def _dtypes(view: HfView) -> Iterator[tuple[str, torch.dtype]]:
    """What parameters are computed with; their numbers are in files of their own, as under ZeRO 3."""
    for name, source in view.dense.items():
        if name.startswith(MODEL):
            yield name.removeprefix(MODEL), source.dtype
    for path in view.modules:
        for name, source in view.experts(path, Plane.WEIGHT):
            yield f"{path}.{name}", source.dtype


def _model(view: HfView) -> dict[str, Any]:
    values = view.opened.manifest.values
    position = values.get("position") or {
        "global_steps": view.opened.manifest.step,
        "global_samples": int(values.get("run", {}).get("consumed_samples", 0)),
        "skipped_steps": 0,
    }
    return {
        **values.get("client", {}),
        "module": {name: torch.empty(0, dtype=dtype) for name, dtype in _dtypes(view)},
        "buffer_names": [],
        "lr_scheduler": values.get("schedule") if "client" in values else {"last_batch_iteration": view.steps - 1},
        "global_steps": position["global_steps"],
        "global_samples": position["global_samples"],
        "skipped_steps": position["skipped_steps"],
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": _VERSION,
    }

"""Megatron-LM's writer of distributed checkpoints with ``--megascale``: no second model in memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from megatron_ext import patches
from megatron_ext.megatron_lm import session
from megatron_ext.megatron_lm.hooks import argument, missing, wrap
from megatron_ext.spared_copies import WithoutData, late_bucket, with_data


def hook(module: ModuleType) -> None:
    """Hooks the writer in ``megatron.core.dist_checkpointing.strategies.filesystem_async``; see [Note: late copies]."""
    writer = getattr(module, "FileSystemWriterAsync", None)
    if writer is None:
        raise missing(module.__name__, "FileSystemWriterAsync")
    wrap(writer, "prepare_write_data", _plan, takes=("self", "plan", "planner"))
    wrap(writer, "write_preloaded_data", _write, takes=("write_bucket",))


def _spares() -> Callable[[torch.Tensor], bool] | None:
    """Which copies of a run with pages need not be made before it is written; None: of no run, or all must be.

    A child that saves beside training shares the files of experts with it; another process is sent what it writes.
    """
    running = session.current()
    if running is None or running.saves == "elsewhere":
        return None
    return (lambda tensor: True) if running.saves == "waiting" else patches.active_runtime().export.holds


def _plan(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - stock's
    spared = _spares()
    if spared is None:
        return original(*args, **kwargs)
    writer, plan, planner = (argument(original, name, args, kwargs) for name in ("self", "plan", "planner"))
    result = original(writer, plan, WithoutData(planner, spared))
    writer.write_buckets = with_data(writer.write_buckets, planner)
    return result


def _write(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - stock's
    """In the process or thread that writes a file."""
    if _spares() is None:
        return original(*args, **kwargs)
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.arguments["write_bucket"] = late_bucket(bound.arguments["write_bucket"], _release)
    return original(*bound.args, **bound.kwargs)


def _release() -> None:
    """Written copies of experts leave memory."""
    patches.active_runtime().export.let_go()

"""One run of a Megatron-LM script with ``--megascale``: enabled before its model is built, told about every step."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch

from megascale_omni.config import MegaScaleConfig
from megascale_omni.experts.overview import managers, paged_experts
from megatron_ext import patches
from megatron_ext.arguments import config_from_args, enable_from_args
from megatron_ext.megatron_lm.hooks import argument, mistakes_we_find, wrap

if TYPE_CHECKING:
    from megatron_ext.chained_optimizer import MegaScaleChainedOptimizer
    from megatron_ext.checkpoints import PagedCheckpoints


@dataclass
class Session:
    """What a run is made of; the one of this process is ``current``."""

    config: MegaScaleConfig
    model: Sequence[torch.nn.Module] = ()
    saves: Literal["waiting", "forked", "elsewhere"] = "waiting"
    """In stock's format: while training waits, in a child of this process, or in a process that is sent everything."""
    _checkpoints: dict[str, PagedCheckpoints] = field(default_factory=dict)

    def checkpoints(
        self, folder: str, optimizer: MegaScaleChainedOptimizer, *, remember: bool = True
    ) -> PagedCheckpoints:
        """Checkpoints of the paged format in ``folder``; one that is only loaded from is not to be remembered."""
        from megatron_ext.checkpoints import PagedCheckpoints
        from megatron_ext.distributed import MegaScaleDDP

        found = self._checkpoints.get(folder)
        if found is None:
            chunks = [chunk for chunk in self.model if isinstance(chunk, MegaScaleDDP)]
            found = PagedCheckpoints(folder, chunks=chunks, optimizer=optimizer, config=self.config.checkpoint)
            if remember:
                self._checkpoints[folder] = found
        return found

    def poll(self) -> None:
        """Between steps: a save beside training that is over counts from now on."""
        for checkpoints in self._checkpoints.values():
            checkpoints.poll()

    def finish(self) -> None:
        """At the end: waits for the save under way, and ends traces and pictures."""
        for checkpoints in self._checkpoints.values():
            checkpoints.finish()
            checkpoints.close()
        self._checkpoints.clear()
        patches.disable()

    def metrics(self) -> dict[str, float]:
        """What is logged under ``megascale/``: counters since the start, of this rank."""
        from megatron_ext.dispatcher import GroupsTokenDispatcher

        total: Counter[str] = Counter()
        for manager in managers(self.model):
            total.update({f"pages/{name}": count for name, count in manager.stats().items()})
        modules = [module for chunk in self.model for module in chunk.modules()]
        for module in modules:
            dispatcher = getattr(module, "token_dispatcher", None)
            if isinstance(dispatcher, GroupsTokenDispatcher):
                total.update({f"groups/{name}": value for name, value in dispatcher.metrics().items()})
        total["experts/modules"] = len(paged_experts(self.model))
        return {f"megascale/{name}": float(value) for name, value in sorted(total.items())}


_sessions: list[Session] = []


def current() -> Session | None:
    """This process's session; None where the script was started without ``--megascale``, or has no model yet."""
    return _sessions[-1] if _sessions else None


def hook(module: ModuleType) -> None:
    """Hooks ``megatron.training.training``: where the model is built, a step is logged, and training ends."""
    wrap(module, "pretrain", _pretrain)
    wrap(module, "setup_model_and_optimizer", _set_up)
    wrap(module, "training_log", _log, takes=("iteration",))


def _set_up(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - stock's
    from megatron.training import get_args

    options = get_args()
    config = config_from_args(options)
    if config is None:
        return original(*args, **kwargs)
    with mistakes_we_find():
        enable_from_args(options)
        session = Session(config, saves=_way_of_saving(options))
        _sessions.append(session)
        result = original(*args, **kwargs)
    session.model = result[0]
    return result


def _way_of_saving(options: argparse.Namespace) -> Literal["waiting", "forked", "elsewhere"]:
    if not getattr(options, "async_save", False):
        return "waiting"
    return "elsewhere" if getattr(options, "use_persistent_ckpt_worker", False) else "forked"


def _pretrain(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - stock's
    try:
        result = original(*args, **kwargs)
    except SystemExit:  # how stock ends at --exit-interval and the like
        _finish()
        raise
    _finish()
    return result


def _finish() -> None:
    session = current()
    if session is not None:
        session.finish()


def _log(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - stock's
    result = original(*args, **kwargs)
    session = current()
    if session is not None:
        session.poll()
        iteration = int(argument(original, "iteration", args, kwargs))
        _write_metrics(session, iteration)
    return result


def _write_metrics(session: Session, iteration: int) -> None:
    from megatron.training import get_args
    from megatron.training.global_vars import get_tensorboard_writer

    writer = get_tensorboard_writer()
    if writer is None or iteration % get_args().tensorboard_log_interval:
        return
    for name, value in session.metrics().items():
        writer.add_scalar(name, value, iteration)

"""The project's own checkpoints for a Megatron run: saves, loads, and what goes on between steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron.core
import torch

from megascale_omni.checkpoint.checkpointer import Checkpointer, Opened, RankState, SaveRequest
from megascale_omni.checkpoint.dense import TensorPiece
from megascale_omni.checkpoint.journal import Journal
from megascale_omni.checkpoint.opening import check_kind
from megascale_omni.config import CheckpointConfig
from megascale_omni.ranks import GroupRanks
from megatron_ext.chained_optimizer import MegaScaleChainedOptimizer
from megatron_ext.checkpoint_frozen import FrozenState, frozen_state, parts_here
from megatron_ext.checkpoint_state import (
    OBJECT,
    OPTIMIZER,
    RNG,
    KeyPlace,
    addresses,
    configuration,
    coordinates,
    experts_pieces,
    fresh_masters,
    innermost,
    layout,
    model_pieces,
    model_places,
    optimizer_pieces,
    restore_rng,
    rng_pieces,
)
from megatron_ext.distributed import MegaScaleDDP

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Position:
    """Where a run stands: iteration, plain values of its own (data, arguments), the learning-rate schedule's state."""

    iteration: int
    values: Mapping[str, Any]
    schedule: Mapping[str, Any] | None


class PagedCheckpoints:
    """Checkpoints of one run under ``root``. Every method but :meth:`close` is a collective of all ranks.

    ``chunks`` and ``optimizer`` are what stock's classes became with MegaScale enabled. While a save goes on beside
    training, the optimizer and the pages' managers tell it before they change anything.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        chunks: Sequence[MegaScaleDDP],
        optimizer: MegaScaleChainedOptimizer,
        config: CheckpointConfig,
    ) -> None:
        self.config = config
        self._chunks, self._optimizer = tuple(chunks), optimizer
        self._checkpointer = Checkpointer(
            root,
            ranks=GroupRanks(),
            keep=config.keep,
            staging_bytes=config.staging_bytes,
            cpus=config.cpu_set(),
        )
        self._configuration = configuration(self._chunks, optimizer)
        self._saves = 0
        self._places: _Places | None = None
        self._managers = {experts.manager for chunk in chunks for experts in chunk.paged_experts}
        optimizer.before_step = self._checkpointer.before_step
        for manager in self._managers:
            manager.before_write = self._checkpointer.before_write
        self._journal = Journal(root, layout=layout()) if self._checkpointer.ranks.rank == 0 else None

    def record(self, iteration: int, *, loss: float, learning_rate: float, position: int) -> None:
        """Writes a step down, or proves that one that is made again is what it was. Not a collective."""
        if self._journal is not None:
            self._journal.record(iteration, loss=loss, learning_rate=learning_rate, position=position)

    @property
    def stall_seconds(self) -> float:
        """How long training waited for the last save beside it, after it had begun."""
        return self._checkpointer.last_stall_seconds

    def save(self, position: Position, *, include_optimizer: bool = True, include_rng_state: bool = True) -> Path:
        """Writes a checkpoint, or begins to, with ``config.beside``.

        Raises:
            SaveError: the checkpoint could not be written; one beside training is told by :meth:`poll` instead.
        """
        since_full = self._saves % self.config.full_every
        request = SaveRequest(
            tag=f"iter_{position.iteration:07d}",
            step=position.iteration,
            values={
                "run": dict(position.values),
                "schedule": None if position.schedule is None else dict(position.schedule),
                "optimizer": include_optimizer,
                "rng": include_rng_state,
                "stock": self._optimizer.described_state() if include_optimizer else None,
                "clipping": None if self._optimizer.clipping is None else self._optimizer.clipping.state_dict(),
                "saves_since_full": since_full,
                "paging_step": max((m.schedule.moment.step for m in self._managers), default=0),
            },
            layout=layout(),
            configuration=self._configuration,
            versions={"megatron-core": megatron.core.__version__},
            full=since_full == 0,
            include_optimizer=include_optimizer,
            coordinates=coordinates(),
        )
        state = self._state(include_optimizer=include_optimizer, include_rng_state=include_rng_state)
        self._saves += 1
        if self.config.beside:
            self._tell(self._checkpointer.save_beside(state, request))
            return self._checkpointer.store.root / request.tag
        return self._checkpointer.save(state, request)

    def _state(self, *, include_optimizer: bool, include_rng_state: bool, opened: Opened | None = None) -> RankState:
        if self._places is None or not self._places.still_hold(self._chunks):
            self._places = _Places.of(self._chunks)
        tensors = [*self._places.model, *(self._places.markers if opened is None else ())]
        if include_optimizer and opened is None:
            tensors += [*self._places.optimizer(self._optimizer), *self._optimizer.carried]
        elif opened is not None and include_optimizer:
            tensors += optimizer_pieces(self._optimizer, self._places.places, stored=opened.dense)
        if include_rng_state:
            tensors += rng_pieces()
        return RankState(tensors, experts_pieces(self._chunks, self._optimizer), self._optimizer.paged.adam)

    def poll(self) -> None:
        """To be called between steps: makes a save beside training count; a failure is an error in the log."""
        self._tell(self._checkpointer.poll())

    def finish(self) -> None:
        """Waits for the save under way."""
        self._tell(self._checkpointer.finish())

    def _tell(self, problem: str | None) -> None:
        if problem is not None:
            self._saves = 0  # nothing to build an increment on
            if self._checkpointer.ranks.rank == 0:
                logger.error("%s; training goes on", problem)

    def load(
        self,
        *,
        tag: str | None = None,
        include_optimizer: bool = True,
        include_rng_state: bool = True,
        check: Callable[[Position], None] = lambda position: None,
    ) -> Position | None:
        """Loads the newest whole checkpoint, or the one named ``tag``, in place; None where there is none.

        A save under way is waited for. ``check`` may refuse a position before anything is loaded.

        Raises:
            CheckpointError: damaged. ValueError: it does not fit; nothing has been loaded then.
        """
        self.finish()
        opened = self._checkpointer.open(tag)
        if opened is None:
            return None
        check_kind(opened, ("run", "schedule", "optimizer", "rng"), kind="a Megatron run")
        values = opened.manifest.values
        position = Position(opened.manifest.step, values["run"], values["schedule"])
        check(position)
        if include_optimizer and not values["optimizer"]:
            raise ValueError(f"checkpoint {opened.folder} has no optimizer state: load it with --no-load-optim")
        state = self._state(include_optimizer=include_optimizer, include_rng_state=False, opened=opened)
        ignored: tuple[str, ...] = (RNG, OBJECT) if include_optimizer else (RNG, OBJECT, OPTIMIZER)
        frozen = self._frozen(opened, state) if include_optimizer else []
        ignored += tuple(dict.fromkeys(part.name for part in frozen))
        if include_optimizer:  # heat, which counts in steps of the schedule, goes on
            for manager in self._managers:
                manager.schedule.resume_at(int(values.get("paging_step", opened.manifest.step)))
        assert self._places is not None
        make_masters = fresh_masters(self._optimizer, self._places.places, stored=opened.dense)
        self._checkpointer.load(opened, state, with_optimizer=include_optimizer, ignored=ignored)
        self._saves = int(values.get("saves_since_full", -1)) + 1 if self._checkpointer.has_base else 0
        self._carry(opened, frozen)
        if not include_optimizer:
            self._optimizer.reload_model_params()
        else:
            make_masters()
        if include_optimizer and self._optimizer.clipping is not None and values["clipping"] is not None:
            self._optimizer.clipping.load_state_dict(values["clipping"])
        if include_rng_state and values["rng"]:
            lost = restore_rng(opened.dense, opened.manifest.layout)
            if lost is not None and self._checkpointer.ranks.rank == 0:
                logger.warning("checkpoint %s: %s", opened.folder, lost)
        return position

    def _frozen(self, opened: Opened, state: RankState) -> list[FrozenState]:
        """Stored optimizer state that nothing in this run steps, the same on all ranks."""
        return frozen_state(opened.dense, self._checkpointer.ranks.gather(parts_here(state.tensors)))

    def _carry(self, opened: Opened, frozen: Sequence[FrozenState]) -> None:
        """Keeps the state of frozen parameters, each on one rank, for the checkpoints that this run saves.

        They are stepped again, perhaps, in a run that loads one of these.
        """
        rank, size = self._checkpointer.ranks.rank, self._checkpointer.ranks.size
        self._optimizer.carried = [part.read(opened.dense) for part in frozen[rank::size]]
        if frozen and rank == 0:
            names = sorted({part.name for part in frozen})
            logger.info("checkpoint %s: optimizer state of frozen parameters is kept: %s", opened.folder, names)

    def close(self) -> None:
        """Ends the writer; a save that no rank waited for does not count."""
        self._checkpointer.close()
        self._places = None  # it keeps the optimizer's state
        self._optimizer.before_step = lambda: None
        for manager in self._managers:
            manager.before_write = lambda page_ids: None


@dataclass
class _Places:
    """Where a model's tensors lie in stock's global ones, as long as they are the same tensors in the same memory.

    What every save would ask for while training waits is kept: ``model``, and the optimizer's pieces by addresses.
    """

    tensors: list[tuple[torch.Tensor, int]]
    places: list[tuple[torch.Tensor, list[KeyPlace]]]
    markers: list[TensorPiece]
    model: list[TensorPiece]
    _optimizer: tuple[tuple[int, ...], list[TensorPiece]] | None = None

    @classmethod
    def of(cls, chunks: Sequence[MegaScaleDDP]) -> _Places:
        """Asks stock."""
        places, markers = model_places(chunks)
        return cls(_tensors(chunks), places, markers, model_pieces(places))

    def still_hold(self, chunks: Sequence[MegaScaleDDP]) -> bool:
        """Whether no parameter or buffer has been replaced or moved."""
        now = _tensors(chunks)
        return len(now) == len(self.tensors) and all(
            a is b and at == was for (a, at), (b, was) in zip(now, self.tensors, strict=True)
        )

    def optimizer(self, optimizer: MegaScaleChainedOptimizer) -> list[TensorPiece]:
        """The pieces of the dense optimizers' state."""
        now = addresses(optimizer)
        if self._optimizer is None or self._optimizer[0] != now:
            self._optimizer = now, optimizer_pieces(optimizer, self.places)
        return self._optimizer[1]


def _tensors(chunks: Sequence[MegaScaleDDP]) -> list[tuple[torch.Tensor, int]]:
    models = [innermost(chunk) for chunk in chunks]  # stock's wrapper has other things named buffers
    return [(tensor, tensor.data_ptr()) for model in models for tensor in (*model.parameters(), *model.buffers())]

"""Stock, its control, and MegaScale: trainers that live in the same processes and make the same steps."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.moe.router import TopKRouter

import megatron_ext
from scripts.exactness.control import split_experts
from scripts.exactness.deviations import CONTROL, MEGASCALE, STOCK
from scripts.exactness.state import ModelState
from scripts.moe_trainer import trainer as trainer_module
from scripts.moe_trainer.arguments import parse_args
from scripts.moe_trainer.distributed import Distributed
from scripts.moe_trainer.trainer import Trainer


@dataclass(frozen=True)
class RandomState:
    """Every random number generator that a step draws from."""

    of_python: tuple[Any, ...]
    of_numpy: dict[str, Any]
    of_torch: torch.Tensor
    of_cuda: list[torch.Tensor]
    of_tracker: dict[str, torch.Tensor]

    @classmethod
    def capture(cls) -> RandomState:
        """The state now."""
        return cls(
            of_python=random.getstate(),
            of_numpy=numpy.random.get_state(legacy=False),  # type: ignore[arg-type]
            of_torch=torch.get_rng_state(),
            of_cuda=torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            of_tracker=dict(get_cuda_rng_tracker().get_states()),
        )

    def restore(self) -> None:
        """Go back to it."""
        random.setstate(self.of_python)
        numpy.random.set_state(self.of_numpy)
        torch.set_rng_state(self.of_torch)
        if self.of_cuda:
            torch.cuda.set_rng_state_all(self.of_cuda)
        get_cuda_rng_tracker().set_states(dict(self.of_tracker))


class Side:
    """One trainer, with what it routed where."""

    def __init__(self, name: str, trainer: Trainer) -> None:
        self.name = name
        self.trainer = trainer
        self.state = ModelState(trainer.model, trainer.optimizer, distributed=trainer.args.use_distributed_optimizer)
        self._routed: list[torch.Tensor] = []
        for chunk in trainer.model:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(self._note_routing)

    def take_routing(self) -> list[torch.Tensor]:
        """The routing maps (bool [tokens, experts]) of every router call since the last `take_routing`."""
        routed, self._routed = self._routed, []
        return routed

    def _note_routing(self, module: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._routed.append(output[1].detach().clone())


class Sides:
    """The sides of one layout, from the same flags and the same seed. `close`, or leaving `with`, takes them down."""

    def __init__(
        self, flags: Sequence[str], megascale_flags: Sequence[str], *, names: Sequence[str], world: int
    ) -> None:
        self._distributed: Distributed | None = None
        self.by_name: dict[str, Side] = {}
        self._start: RandomState | None = None
        try:
            for name in names:
                extra = ["--megascale", *megascale_flags] if name == MEGASCALE else []
                self.by_name[name] = self._build(name, [*flags, *extra], world)
        except BaseException:
            self.close()
            raise

    @property
    def stock(self) -> Side:
        """The reference."""
        return self.by_name[STOCK]

    @property
    def others(self) -> list[Side]:
        """What is compared with stock."""
        return [side for name, side in self.by_name.items() if name != STOCK]

    def _build(self, name: str, flags: list[str], world: int) -> Side:
        args = parse_args(flags, world_size=world)
        try:
            with self._one_set_of_groups():
                trainer = Trainer(args)
        finally:
            megatron_ext.disable()
        self._distributed = trainer.distributed
        if name == CONTROL:
            split_experts(trainer.model)
        return Side(name, trainer)

    @contextmanager
    def _one_set_of_groups(self) -> Iterator[None]:
        """Megatron's groups exist once a process: the first trainer makes them, the others start in them as it did."""
        original = trainer_module.Distributed
        if self._distributed is not None:
            assert self._start is not None
            shared = self._distributed
            self._start.restore()
            trainer_module.Distributed = lambda args: shared  # type: ignore[assignment, misc]
        else:

            def first(args: Any) -> Distributed:  # noqa: ANN401 - the trainer's namespace
                made = original(args)
                self._start = RandomState.capture()
                return made

            trainer_module.Distributed = first  # type: ignore[assignment, misc]
        try:
            yield
        finally:
            trainer_module.Distributed = original  # type: ignore[misc]

    def close(self) -> None:
        """Take everything down; idempotent."""
        distributed, self._distributed = self._distributed, None
        for side in self.by_name.values():
            side.trainer.__dict__.pop("distributed", None)  # it is shared: closed once, below
            side.trainer.close()
        self.by_name = {}
        if distributed is not None:
            distributed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

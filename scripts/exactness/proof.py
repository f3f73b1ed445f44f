"""What every rank of a layout does: the step-by-step proof, the mutant, the free run. See `prove_exactness.py`."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.exactness.checks import Outcome, compare
from scripts.exactness.deviations import CONTROL, MEGASCALE, STOCK, Deviation, FreeStep, MutatedStep, ProvedStep
from scripts.exactness.sides import RandomState, Side, Sides

MUTANT_FACTOR = 1.001


class Proof:
    """One layout on one rank. Every method is a collective of all ranks.

    With `control` or `megascale` False that side is left out.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        *,
        flags: Sequence[str],
        megascale_flags: Sequence[str],
        control: bool = True,
        megascale: bool = True,
    ) -> None:
        self._rank, self._world = rank, world
        self._flags, self._megascale_flags = list(flags), list(megascale_flags)
        self._names = [STOCK, *([CONTROL] if control else []), *([MEGASCALE] if megascale else [])]
        self._sides: Sides | None = None

    def open(self) -> list[str]:
        """Build every side anew. Returns the tensors, by side, whose initial weights are not stock's bit for bit."""
        self.close()
        self._sides = Sides(self._flags, self._megascale_flags, names=self._names, world=self._world)
        reference = self._sides.stock.state.weights()
        return [
            f"{side.name}: {name}"
            for side in self._sides.others
            for name, weight in side.state.weights().items()
            if name not in reference or not weight.equal(reference[name])
        ]

    def prove(self, steps: int) -> list[ProvedStep]:
        """Make steps of which each begins in stock's state on every side."""
        return [self._proved_step() for _ in range(steps)]

    def mutate(self, steps: int) -> list[MutatedStep]:
        """The same with one expert's gradient x 1.001 in MegaScale, on rank 0."""
        return [self._mutated_step() for _ in range(steps)]

    def run_free(self, steps: int) -> list[FreeStep]:
        """Make steps of which each side begins in its own state."""
        return [self._free_step() for _ in range(steps)]

    def close(self) -> None:
        """Take every side down; idempotent."""
        if self._sides is not None:
            self._sides.close()
            self._sides = None

    def _opened(self) -> Sides:
        if self._sides is None:
            raise RuntimeError("the sides are not there: call open() first")
        return self._sides

    def _proved_step(self) -> ProvedStep:
        sides = self._opened()
        before, random = sides.stock.state.state(), RandomState.capture()
        stock, _ = self._outcome(sides.stock, random, mutant=False)
        deviations: dict[str, list[Deviation]] = {}
        for side in sides.others:
            side.state.load(before)
            outcome, _ = self._outcome(side, random, mutant=False)
            deviations[side.name] = compare(outcome, stock, before=before)
        return ProvedStep(stock.loss, deviations)

    def _mutated_step(self) -> MutatedStep:
        sides = self._opened()
        before, random = sides.stock.state.state(), RandomState.capture()
        stock, _ = self._outcome(sides.stock, random, mutant=False)
        for side in sides.others:
            side.state.load(before)
            outcome, expert = self._outcome(side, random, mutant=side.name == MEGASCALE)
            deviations = compare(outcome, stock, before=before)
        return MutatedStep(expert, deviations)

    def _outcome(self, side: Side, random: RandomState, *, mutant: bool) -> tuple[Outcome, str | None]:
        random.restore()
        side.take_routing()
        loss = side.trainer.forward_backward()
        expert = side.state.scale_one_expert(MUTANT_FACTOR) if mutant and self._rank == 0 else None
        gradients = side.state.gradients()
        result = side.trainer.optimizer_step()
        if not result.successful or result.grad_norm is None:
            raise RuntimeError(f"{side.name}: the optimizer skipped the step, or gave no gradient norm: {result}")
        return Outcome(loss, result.grad_norm, side.take_routing(), gradients, side.state.state()), expert

    def _free_step(self) -> FreeStep:
        sides = self._opened()
        random = RandomState.capture()
        losses: dict[str, float] = {}
        norms: dict[str, float] = {}
        for name, side in sides.by_name.items():
            random.restore()
            result = side.trainer.train_step()
            side.take_routing()
            if result.grad_norm is None or result.skipped:
                raise RuntimeError(f"{name}: the optimizer skipped the step, or gave no gradient norm")
            losses[name], norms[name] = result.loss, result.grad_norm
        return FreeStep(losses, norms)

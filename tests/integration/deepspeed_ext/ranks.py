"""What the ranks of these tests do, as functions of a job (see tests/distributed/pool.py)."""

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from scripts.deepspeed_runs.models import build, configuration
from scripts.deepspeed_runs.proof import Case, Side, batches_of, prove, prove_control
from scripts.deepspeed_runs.state import State, read_state
from tests.distributed.deepspeed_state import fresh_deepspeed


def prove_cases(
    rank: int, world: int, *, cases: list[Case], mutate: bool = False, control: bool = False
) -> list[object]:
    """What each case deviates by; with ``control``, pairs of that and what stock deviates from itself by."""
    with fresh_deepspeed():
        import deepspeed_ext  # noqa: F401 - its import is what is tested

        found = [prove(rank, world, case=case, mutate=mutate) for case in cases]
        if not control:
            return list(found)
        return [(one, prove_control(rank, world, case=case)) for one, case in zip(found, cases, strict=True)]


def prove_with_kernels(rank: int, world: int, *, cases: list[Case]) -> list[object]:
    """What each case, experts computed by interpreted kernels, and stock deviate by; and launchers that were called."""
    from megascale_omni.kernels.interpreter import interpreted

    with interpreted(), fresh_deepspeed():
        import deepspeed_ext  # noqa: F401
        from megascale_omni.kernels import backend, weighted_outputs

        launchers = ((weighted_outputs, "unpermute"), (weighted_outputs, "weight_gradient"), (backend, "sum_by_token"))
        with ExitStack() as stack:
            mocks = [stack.enter_context(patch.object(m, n, wraps=getattr(m, n))) for m, n in launchers]
            found = [
                (prove(rank, world, case=c), prove_control(rank, world, case=c) if c.bf16 else None) for c in cases
            ]
            return [*found, [name for (_, name), mock in zip(launchers, mocks, strict=True) if mock.called]]


def side_of(case: Case) -> Side:
    """Megascale's side of a case."""
    import deepspeed_ext  # noqa: F401

    config = configuration(case.family, case.size, experts_implementation=case.experts_implementation)
    return Side(case, build(config, seed=7), megascale=True)


def steps(side: Side, rank: int, world: int, numbers: range) -> list[tuple[float, float | None]]:
    return [side.step(batches_of(side.case, rank, world, number)) for number in numbers]


def interrupted(rank: int, world: int, *, cases: list[Case], folder: str) -> list[dict[str, object]]:
    """Losses and norms of steps 3 and 4 of a run, and of another one that loads its checkpoint of step 3."""
    found: list[dict[str, object]] = []
    with fresh_deepspeed():
        for number, case in enumerate(cases):
            here, first = str(Path(folder) / str(number)), side_of(case)
            steps(first, rank, world, range(3))
            first.engine.save_checkpoint(here)
            whole = steps(first, rank, world, range(3, 5))
            after = read_state(first.engine)
            first.engine.destroy()
            second = side_of(case)
            if not case.stage:  # what it was before must not matter; ZeRO wants a new engine
                steps(second, rank, world, range(7, 8))
            path, _ = second.engine.load_checkpoint(here)
            resumed = steps(second, rank, world, range(3, 5))
            same = differences(after, read_state(second.engine))
            found.append({"path": path, "whole": whole, "resumed": resumed, "different": same})
            second.engine.destroy()
    return found


def differences(one: State, other: State) -> list[str]:
    """Tensors that are not equal bit for bit."""
    names = [f"{name} {kind}" for name, kinds in one.items() for kind in kinds]
    return [n for n in names if not one[n.split()[0]][n.split()[1]].equal(other[n.split()[0]][n.split()[1]])]


def saved(rank: int, world: int, *, case: Case, folder: str) -> State:
    """The state of a run that has saved its third step."""
    with fresh_deepspeed():
        side = side_of(case)
        steps(side, rank, world, range(3))
        side.engine.save_checkpoint(folder)
        state = read_state(side.engine)
        side.engine.destroy()
        return state


def saved_twice(rank: int, world: int, *, case: Case, folder: str) -> list[str]:
    """What is said of a checkpoint that a second save of its tag, in which DeepSpeed failed, has left; and of how the
    run goes on.
    """
    with fresh_deepspeed():
        side = side_of(case)
        engine = side.engine
        said = []
        for number, fails in ((0, False), (1, True)):
            steps(side, rank, world, range(number, number + 1))
            before, saving = read_state(engine), engine._save_zero_checkpoint
            if fails:
                engine._save_zero_checkpoint = _disk_is_full
            try:
                engine.save_checkpoint(folder, tag="best")
            except OSError as error:
                said.append(str(error))
            engine._save_zero_checkpoint = saving
        for attempt in (lambda: engine.load_checkpoint(folder), lambda: fp32_state_of(folder)):
            try:
                attempt()
            except ValueError as error:
                said.append(str(error))
        said.append(f"{len(differences(before, read_state(engine)))} tensors changed")
        engine.save_16bit_model(folder)  # commits as a checkpoint does
        assert not (Path(folder) / "best" / "megascale").exists()
        engine.save_checkpoint(folder, tag="best")
        engine.destroy()
        other = side_of(case).engine
        other.load_checkpoint(folder)
        said.append(f"{len(differences(before, read_state(other)))} tensors changed")
        other.destroy()
        return said


def _disk_is_full(*_: object) -> None:
    raise OSError("no space left")


def fp32_state_of(folder: str) -> dict[str, torch.Tensor]:
    from deepspeed.utils import zero_to_fp32

    found: dict[str, torch.Tensor] = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    return found


def loaded(rank: int, world: int, *, case: Case, folder: str, optimizer_states: bool = True) -> State:
    """The state of a run that loads a checkpoint."""
    with fresh_deepspeed():
        side = side_of(case)
        side.engine.load_checkpoint(folder, load_optimizer_states=optimizer_states)
        state = read_state(side.engine)
        side.engine.destroy()
        return state


def saved_elastic(
    rank: int, world: int, *, case: Case, folder: str
) -> tuple[State, list[tuple[float, float | None]], object]:
    """The state of a run that has saved its third step in the project's own format, its next two losses, and what
    clipping by module had measured.
    """
    with fresh_deepspeed():
        side = side_of(case)
        steps(side, rank, world, range(3))
        deepspeed_ext_of().save_elastic(side.engine, folder, client_state={"epoch": 7})
        state, clipping = read_state(side.engine), clipping_of(side)
        after = steps(side, rank, world, range(3, 5))
        side.engine.destroy()
        return state, after, clipping


def handed_on_by_a_run_that_freezes(rank: int, world: int, *, case: Case, folder: str, target: str, name: str) -> None:
    """Loads, and saves again, where parameters whose names have ``name`` in them are not stepped."""
    with fresh_deepspeed():
        import deepspeed_ext  # noqa: F401

        model = build(configuration(case.family, case.size), seed=8)
        for path, parameter in model.named_parameters():
            parameter.requires_grad_(name not in path)
        side = Side(case, model, megascale=True)
        deepspeed_ext_of().load_elastic(side.engine, folder)
        deepspeed_ext_of().save_elastic(side.engine, target)
        side.engine.destroy()


def clipping_of(side: Side) -> object:
    """The state of clipping by module, as text: not every number in it is equal to itself."""
    clipping = side.engine.experts_step.clipping
    return None if clipping is None else repr(clipping.state_dict())


def loaded_elastic(
    rank: int, world: int, *, case: Case, folder: str
) -> tuple[State, list[tuple[float, float | None]], object]:
    """The state of a run that loads it, its next two losses, and client state, position and state of clipping."""
    with fresh_deepspeed():
        side = side_of(case)
        client = deepspeed_ext_of().load_elastic(side.engine, folder)
        state = read_state(side.engine)
        told = client, side.engine.global_steps, clipping_of(side)
        after = steps(side, rank, world, range(3, 5))
        side.engine.destroy()
        return state, after, told


def saved_by_stock(rank: int, world: int, *, case: Case, folder: str) -> State:
    """The state of a run of stock's that has saved its third step."""
    with fresh_deepspeed():
        side = Side(case, build(configuration(case.family, case.size), seed=7), megascale=False)
        steps(side, rank, world, range(3))
        side.engine.save_checkpoint(folder, client_state={"epoch": 7})
        state = read_state(side.engine)
        side.engine.destroy()
        return state


def loaded_universal(rank: int, world: int, *, case: Case, folder: str) -> tuple[State, object]:
    """The state of a run of stock that loads a universal checkpoint; client state, position, place in the schedule."""
    with fresh_deepspeed():
        case = replace(case, extra={"checkpoint": {"load_universal": True}})
        side = Side(case, build(configuration(case.family, case.size), seed=8), megascale=False)
        _, client = side.engine.load_checkpoint(folder)
        told = client["epoch"], side.engine.global_steps, side.engine.lr_scheduler.last_batch_iteration
        state = read_state(side.engine)
        side.engine.destroy()
        return state, told


Batches = list[tuple[torch.Tensor, torch.Tensor]]
"""Tokens and labels."""


def saved_by_megatron(rank: int, world: int, *, corpus: str, options: str, folder: str) -> tuple[list[float], Batches]:
    """The losses of two steps after the one that a Megatron run has saved, and what this rank made the first of."""
    from tests.integration.megatron_ext.runs import losses, trainer

    with trainer(corpus, options, f"--save {folder}", megascale=True) as run:
        losses(run, 3)
        run.save()
        run.finish_saves()
        batches = [(batch.tokens, batch.labels) for batch in run.data.training(run.consumed_samples)]
        return losses(run, 2), batches


def goes_on_under_megatron(rank: int, world: int, *, corpus: str, options: str, folder: str) -> list[float]:
    """The next two losses of a Megatron run that has loaded a checkpoint."""
    from tests.integration.megatron_ext.runs import losses, trainer

    with trainer(corpus, options, f"--load {folder}", megascale=True) as run:
        assert (run.iteration, run.consumed_samples) == (3, 24)
        return losses(run, 2)


def goes_on_from_megatron(
    rank: int, world: int, *, case: Case, folder: str, batches: Batches
) -> tuple[State, float, tuple[int, int, int], float]:
    """State, loss, position and learning rate of a DeepSpeed run that has loaded what a Megatron run saved."""
    with fresh_deepspeed():
        side = side_of(case)
        engine = side.engine
        assert deepspeed_ext_of().load_elastic(engine, folder) == {}
        with torch.no_grad():
            found = [
                torch.nn.functional.cross_entropy(engine(input_ids=tokens).logits.flatten(0, 1), labels.flatten())
                for tokens, labels in batches
            ]
        position = engine.global_steps, engine.global_samples, engine.micro_steps
        result = (
            read_state(engine),
            float(torch.stack(found).mean()) if found else 0.0,
            position,
            float(engine.get_lr()[0]),
        )
        engine.destroy()
        return result


def deepspeed_ext_of() -> Any:
    import deepspeed_ext.elastic

    return deepspeed_ext.elastic


def fp32_of(rank: int, world: int, *, folder: str) -> dict[str, torch.Tensor]:
    """What zero_to_fp32 makes of a checkpoint."""
    with fresh_deepspeed():
        from deepspeed.utils import zero_to_fp32

        import deepspeed_ext  # noqa: F401

        state: dict[str, torch.Tensor] = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
        return state


def fp32_script(rank: int, world: int, *, arguments: list[str]) -> None:
    """Runs what the script beside a checkpoint does."""
    with fresh_deepspeed():
        from deepspeed_ext.fp32 import main

        main(arguments)


def lose_a_rank(rank: int, world: int, *, case: Case, dead: int, exchanges: int) -> None:
    """A step in which rank ``dead`` ends instead of making one more exchange of tokens."""
    from megascale_omni.groups import channel
    from megascale_omni.groups.channel import Channel

    with fresh_deepspeed():
        side, made, exchange = side_of(case), 0, Channel.exchange

        def counted(self: Channel, *args: Any) -> torch.Tensor:
            nonlocal made
            if rank == dead and made == exchanges:
                os._exit(7)
            made += 1
            return exchange(self, *args)

        channel._ANSWER_SECONDS = 0.3  # this process ends with the test
        Channel.exchange = counted  # type: ignore[method-assign,assignment]
        steps(side, rank, world, range(1))

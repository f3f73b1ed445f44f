"""What the ranks of these tests do, as functions of a job (see tests/distributed/pool.py)."""

from pathlib import Path
from typing import Any

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


def loaded(rank: int, world: int, *, case: Case, folder: str, optimizer_states: bool = True) -> State:
    """The state of a run that loads a checkpoint."""
    with fresh_deepspeed():
        side = side_of(case)
        side.engine.load_checkpoint(folder, load_optimizer_states=optimizer_states)
        state = read_state(side.engine)
        side.engine.destroy()
        return state


def saved_elastic(rank: int, world: int, *, case: Case, folder: str) -> tuple[State, list[tuple[float, float | None]]]:
    """The state of a run that has saved its third step in the project's own format, and its next two losses."""
    with fresh_deepspeed():
        side = side_of(case)
        steps(side, rank, world, range(3))
        deepspeed_ext_of().save_elastic(side.engine, folder, client_state={"epoch": 7})
        state = read_state(side.engine)
        after = steps(side, rank, world, range(3, 5))
        side.engine.destroy()
        return state, after


def loaded_elastic(
    rank: int, world: int, *, case: Case, folder: str
) -> tuple[State, list[tuple[float, float | None]], object]:
    """The state of a run that loads it, its next two losses, and the client state and position."""
    with fresh_deepspeed():
        side = side_of(case)
        client = deepspeed_ext_of().load_elastic(side.engine, folder)
        state = read_state(side.engine)
        position = side.engine.global_steps
        after = steps(side, rank, world, range(3, 5))
        side.engine.destroy()
        return state, after, (client, position)


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

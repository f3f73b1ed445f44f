"""The comparison with Megatron-LM's own `pretrain_gpt.py` instead of the project's trainer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from scripts.measuring.environment import describe, measured_environment
from scripts.megatron_lm_runs.combinations import BASE, ITERATIONS, Combination
from scripts.megatron_lm_runs.comparing import Compared, compare
from scripts.megatron_lm_runs.running import Run, checkout, release

WARMUP = 3


def compare_scripts(
    path: Path,
    *,
    ranks: int,
    flags: Sequence[str],
    own_flags: Sequence[str],
    steps: int,
    picture: Path | None = None,
) -> dict[str, object]:
    """Runs `pretrain_gpt.py` of the checkout ``path`` both ways and prints how they compare; the JSON of it.

    ``flags`` go to both runs, behind those of a small MoE; ``own_flags`` to the run with `--megascale`. ``picture``:
    where losses and times of steps are drawn.

    Raises:
        ValueError: no checkout. RunFailed: a run ended with an error, which it names.
    """
    found = checkout(path)
    given = [*flags, "--log-timers-to-tensorboard"]  # times of steps, of which stock writes down none otherwise
    if ranks > 1 and "--expert-model-parallel-size" not in given:
        given += ["--expert-model-parallel-size", str(ranks)]
    if steps + WARMUP != ITERATIONS:
        given += ["--train-iters", str(steps + WARMUP)]
    compared = compare(found, Combination("comparison", ranks, tuple(given), tuple(own_flags)))
    environment = measured_environment()
    content: dict[str, object] = {
        "environment": environment,
        "megatron_lm": release(found),
        "flags": [*BASE, *given],
        "megascale_flags": ["--megascale", *own_flags],
        "ranks": ranks,
        "runs": [_as_json("stock", compared.stock), _as_json("megascale", compared.megascale)],
        "ratios": {"speed": _step(compared.stock) / _step(compared.megascale)},
        "max_relative_loss_difference": compared.loss_difference,
        "max_relative_grad_norm_difference": compared.norm_difference,
    }
    print(describe(environment))
    _print(compared, release(found), ranks)
    if picture is not None:
        _draw(compared, picture, title=f"pretrain_gpt.py of Megatron-LM {release(found)}: stock and --megascale")
    return content


def _draw(compared: Compared, path: Path, *, title: str) -> None:
    from scripts.comparison.pictures import draw_scripts

    runs = {"stock": compared.stock, "megascale": compared.megascale}
    losses = {name: run.losses for name, run in runs.items()}
    seconds = {name: run.scalars["iteration-time"] for name, run in runs.items()}
    draw_scripts(losses, seconds, title=title, path=path)


def _as_json(name: str, run: Run) -> dict[str, object]:
    return {
        "name": name,
        "step_seconds_median": _step(run),
        "losses": list(run.losses),
        "grad_norms": list(run.scalars["grad-norm"]),
        "metrics": {tag: values[-1] for tag, values in run.scalars.items() if tag.startswith("megascale/")},
    }


def _step(run: Run) -> float:
    """Median seconds of a step, as Megatron-LM logs them: of all but the first."""
    return statistics.median(run.scalars["iteration-time"][WARMUP - 1 :])


def _print(compared: Compared, version: str, ranks: int) -> None:
    print(
        f"pretrain_gpt.py of Megatron-LM {version}, {ranks} rank{'s' * (ranks > 1)}, {len(compared.stock.losses)} steps"
    )
    for name, run in (("stock", compared.stock), ("megascale", compared.megascale)):
        print(f"  {name:10}  {_step(run) * 1000:8.1f} ms a step   loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}")
    print(
        f"  largest relative difference of losses {compared.loss_difference:.1e}, norms {compared.norm_difference:.1e}"
    )

"""Megatron-LM's own scripts: equal losses, nothing changed where the flag is off, checkpoints in every direction."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from scripts.measurements.rows import Context, Row
from scripts.measuring.progress import say
from scripts.megatron_lm_runs.combinations import BASE, COMBINATIONS, EP2, OVERLAP, Combination
from scripts.megatron_lm_runs.comparing import compare, run_stock
from scripts.megatron_lm_runs.matrix import FORMS, STATIONS, Relay, Station, compared
from scripts.megatron_lm_runs.running import Launcher, Run, RunFailed, run
from scripts.megatron_lm_runs.stored import stored_tensors

LOSS_TOLERANCE = 1e-5
_OFF = {"single": Combination("single", 1), "ep2xdp2-overlap": Combination("ep2xdp2-overlap", 4, (*EP2, *OVERLAP))}


def _loss_difference(context: Context, combination: Combination) -> float:
    """L1. Where weights in bf16 amplify the last bit of the norm that clips gradients, the control runs as well."""
    checkout, alike = context.megatron_lm(), (combination.ranks, combination.flags)
    stock = context.once(("stock", *alike), lambda: run_stock(checkout, combination))
    found = compare(checkout, combination, stock=stock, control=combination.clips_in_bf16)
    control = "" if found.control is None else f"; the control's loss {found.control_difference:.2e}"
    say(f"    loss {found.loss_difference:.2e}, gradient norm {found.norm_difference:.2e}{control}")
    return found.loss_difference


def _changed_by_the_launcher(context: Context, combination: Combination) -> float:
    """L2: scalars of 20 iterations and tensors of the final checkpoint that differ from the script alone's."""
    with tempfile.TemporaryDirectory(prefix="megascale-off-") as folder:
        found: dict[Launcher, tuple[Run, Path]] = {}
        for launcher in ("none", "megatron_ext"):
            target = Path(folder) / launcher
            flags = [*BASE, *combination.flags, "--save", str(target), "--save-interval", "1000000"]
            script = context.megatron_lm() / "pretrain_gpt.py"
            done = run(script, flags, ranks=combination.ranks, launcher=launcher)  # type: ignore[arg-type]
            if done.status:
                raise RunFailed(f"{launcher}: {done.error}")
            found[launcher] = (done, target / "iter_0000020")  # type: ignore[index]
        (alone, its), (launched, theirs) = found["none"], found["megatron_ext"]
        names = [n for n in alone.scalars if n in ("lm loss", "grad-norm", "load_balancing_loss", "learning-rate")]
        changed = sum(list(alone.scalars[name]) != list(launched.scalars.get(name, ())) for name in names)
        one, two = stored_tensors(its), stored_tensors(theirs)
        return changed + len(one.keys() ^ two.keys()) + sum(not one[key].equal(two[key]) for key in one.keys() & two)


def _handed_on(context: Context, *, form: str, station: Station) -> float:
    relay = context.once(("matrix", form), lambda: Relay(context.megatron_lm(), form=form))
    changed = relay.changed(station)
    if changed:
        say(f"    changed: {', '.join(changed[:6])}")
    return float(len(changed))


ROWS = (
    *(
        Row(
            id=f"L1-{combination.name}",
            what=f"losses of 20 iterations on {combination.ranks} ranks: largest relative difference from stock's",
            unit="",
            kind="at_most",
            bound=LOSS_TOLERANCE,
            measure=partial(_loss_difference, combination=combination),
        )
        for combination in COMBINATIONS
    ),
    *(
        Row(
            id=f"L2-{name}",
            what=f"flag off, {combination.ranks} ranks: series and tensors that the launcher changes",
            unit="",
            kind="at_most",
            bound=0,
            measure=partial(_changed_by_the_launcher, combination=combination),
        )
        for name, combination in _OFF.items()
    ),
    *(
        Row(
            id=f"L3-{form}-{station.name}",
            what=f"checkpoint handed on to {station.name} ({form}): stored tensors with a changed bit",
            unit="",
            kind="at_most",
            bound=0,
            measure=partial(_handed_on, form=form, station=station),
        )
        for form in FORMS
        for station in compared(STATIONS)
    ),
)

"""Verdicts as tables."""

from collections.abc import Sequence

from scripts.exactness.deviations import CONTROL, MEGASCALE
from scripts.exactness.verdict import LEARNED_NATS, Verdict
from scripts.measuring.tables import Cell, print_table


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """A table of the layouts, then what went over its bound."""
    columns = ("layout", "what", "worst / bound", "control", "mutant", "free run", "control", "learned", "passes")
    print_table(columns, [_row(verdict) for verdict in verdicts], title="Exactness against stock (bound: 1 or less)")
    for verdict in verdicts:
        for line in _complaints(verdict):
            print(f"{verdict.layout.name}: {line}")


def _row(verdict: Verdict) -> tuple[Cell, ...]:
    free, bf16 = verdict.free, verdict.layout.is_bf16
    return (
        verdict.layout.name,
        verdict.layout.what,
        None if verdict.megascale is None else float(f"{verdict.worst_share:.3g}"),
        None if verdict.control is None or bf16 else float(f"{verdict.control_share:.3g}"),
        None if verdict.mutant is None else ("caught" if verdict.mutant.caught else "MISSED"),
        None if free is None or MEGASCALE not in free.losses else float(f"{free.deviation(MEGASCALE):.2e}"),
        None if free is None else float(f"{free.deviation(CONTROL):.2e}"),
        None if free is None else f"{free.learned:.2f} nats",
        verdict.passes,
    )


def _complaints(verdict: Verdict) -> list[str]:
    lines = [f"initial weights differ: {what}" for what in verdict.initial_differences[:3]]
    for worst in (verdict.megascale or {}).values():
        if not verdict.share(worst) <= 1:
            where = f" in {worst.where}" if worst.where else ""
            lines.append(
                f"{worst.kind} deviates by {worst.value:.3g}{where} at step {worst.step} on rank {worst.rank}: "
                f"{verdict.share(worst):.3g} of the bound"
            )
    if verdict.control is not None and not verdict.layout.is_bf16:
        for worst in verdict.control.values():
            if not worst.share <= 1:
                lines.append(f"the control's {worst.kind} deviates by {worst.value:.3g} in {worst.where or 'the step'}")
    if verdict.free is not None:
        if verdict.free.learned < LEARNED_NATS:
            lines.append(f"the free run learned {verdict.free.learned:.2f} nats: too little to prove anything")
        if MEGASCALE in verdict.free.losses and not verdict.free_share <= 1:
            lines.append(f"the free run deviates by {verdict.free.deviation(MEGASCALE):.3g}")
    return lines

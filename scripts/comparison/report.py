"""A comparison as a table."""

from collections.abc import Callable

from scripts.comparison.result import MEGASCALE, STOCK, Comparison, Run
from scripts.measuring.environment import describe
from scripts.measuring.tables import Cell, print_table
from scripts.measuring.units import plain_bytes, plain_seconds

_COLUMNS = ("", STOCK, MEGASCALE, "megascale / stock")


def print_comparison(comparison: Comparison) -> None:
    """Print the table, the classes that ran, and on what."""
    made = comparison.run(STOCK).made
    print_table(_COLUMNS, _rows(comparison), title=f"{comparison.preset}: {made.parameters:,} parameters")
    for run in comparison.runs:
        print(f"{run.name}: {run.made.experts}, {run.made.dispatcher}, {run.made.optimizer}")
    print(describe(comparison.environment))


def _rows(comparison: Comparison) -> list[tuple[Cell, ...]]:
    stock, ours = comparison.run(STOCK), comparison.run(MEGASCALE)

    def row(name: str, value: Callable[[Run], Cell], ratio: float | None = None) -> tuple[Cell, ...]:
        return name, value(stock), value(ours), ratio if ratio is None else round(ratio, 3)

    rows = [
        row("tokens a second", lambda run: run.tokens_per_second, comparison.speed.median),
        row("step, median", lambda run: plain_seconds(run.step_seconds.median), 1 / comparison.speed.median),
        row(
            "peak memory of the processes",
            lambda run: plain_bytes(run.total("peak_rss_bytes")),
            comparison.total_ratio("peak_rss_bytes"),
        ),
        row(
            "peak expert state",
            lambda run: plain_bytes(run.total("expert_state_peak_bytes")),
            comparison.total_ratio("expert_state_peak_bytes"),
        ),
        row("sent to other ranks a step", lambda run: plain_bytes(run.sent_bytes_per_step)),
        row("final training loss", lambda run: f"{run.steps[-1].loss:.6f}"),
    ]
    if stock.validation_loss is not None:
        rows.append(row("validation loss", lambda run: f"{run.validation_loss:.6f}"))
    rows += [
        ("largest loss difference, relative", None, comparison.loss_difference, None),
        ("largest gradient norm difference", None, comparison.grad_norm_difference, None),
    ]
    return rows

"""A comparison as a table."""

from collections.abc import Callable

from scripts.comparison.limited import Limited
from scripts.comparison.result import MEGASCALE, STOCK, Comparison, Run
from scripts.measuring.environment import describe
from scripts.measuring.tables import Cell, print_table
from scripts.measuring.units import plain_bytes, plain_seconds


def print_comparison(comparison: Comparison, *, framework: str = "megatron-core") -> None:
    """Print the table, the classes that ran, and on what; ``framework``: the package that trained."""
    made = comparison.run(STOCK).made
    columns = ("", *(run.name for run in comparison.runs))
    title = f"{comparison.preset}: {made.parameters:,} parameters (in brackets: against stock, speed block by block)"
    print_table(columns, _rows(comparison), title=title)
    print(f"largest relative difference to stock: losses {comparison.loss_difference:.2e}, ", end="")
    print(f"gradient norms {comparison.grad_norm_difference:.2e}")
    if comparison.limited is not None:
        print(_of_limited(comparison.limited))
    for line in _in_words(comparison):
        print(line)
    for run in comparison.runs:
        print(f"{run.name}: {run.made.experts}, {run.made.dispatcher}, {run.made.optimizer}")
    print(describe(comparison.environment, framework=framework))


def _rows(comparison: Comparison) -> list[tuple[Cell, ...]]:
    def row(what: str, value: Callable[[Run], str], ratio: Callable[[str], float] | None = None) -> tuple[Cell, ...]:
        cells = [
            value(run) + ("" if ratio is None or run.name == STOCK else f" ({ratio(run.name):.2f})")
            for run in comparison.runs
        ]
        return (what, *cells)

    def total(what: str, counter: str) -> tuple[Cell, ...]:
        return row(
            what,
            lambda run: plain_bytes(run.total(counter)),
            lambda name: comparison.total_ratio(counter, name),
        )

    def a_step(what: str, counter: str) -> tuple[Cell, ...]:
        return row(what, lambda run: plain_bytes(run.total(counter) / len(run.steps)))

    rows = [
        row(
            "tokens a second",
            lambda run: f"{run.tokens_per_second:,.0f}",
            lambda name: comparison.speed_of(name).median,
        ),
        row("step, median", lambda run: plain_seconds(run.step_seconds.median)),
        total("peak memory of the processes", "peak_rss_bytes"),
        total("peak expert state", "expert_state_peak_bytes"),
        row("sent to other ranks a step", lambda run: plain_bytes(run.sent_bytes_per_step)),
    ]
    if len(comparison.runs) > 2:
        rows += [a_step("pages read a step", "bytes_read"), a_step("pages written a step", "bytes_written")]
    rows.append(row("final training loss", lambda run: f"{run.steps[-1].loss:.6f}"))
    if comparison.run(STOCK).validation_loss is not None:
        rows.append(row("validation loss", lambda run: f"{run.validation_loss:.6f}"))
    return rows


def _of_limited(limited: Limited) -> str:
    became = "; ".join(f"{run.name}: {run.describe()}" for run in limited.runs)
    return (
        f"with {plain_bytes(limited.limit_bytes)} of private memory a process (heaps and stacks, no shared libraries): "
        f"{became}; "
        f"losses as without the limit to {limited.loss_difference:.1e}"
    )


def _in_words(comparison: Comparison) -> list[str]:
    """What paging costs here, and why one would pay it."""
    told = []
    for run in comparison.runs[2:]:
        if not run.name.startswith(MEGASCALE):
            continue
        slower = 1 / comparison.speed_of(run.name).median
        told.append(
            f"{run.name}: a step takes {slower:.2f} times stock's, with "
            f"{comparison.total_ratio('expert_state_peak_bytes', run.name):.2f} of its expert state in memory"
            + (": the price of training a model that does not fit." if slower > 1 else ".")
        )
    return told

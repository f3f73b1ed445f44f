"""Rows H1 to H3 of the house: every layout proved against stock, beside the control and the mutant."""

from __future__ import annotations

from collections.abc import Callable

from scripts.exactness.layouts import LAYOUTS, Layout
from scripts.exactness.runner import prove
from scripts.exactness.verdict import LEARNED_NATS, Verdict
from scripts.measurements.rows import Context, Row


def exactness_rows() -> list[Row]:
    """Step by step (H1), free runs and bf16 (H2), mutant and control (H3). One proof a layout serves all of them."""
    fp32 = [layout for layout in LAYOUTS if not layout.is_bf16]
    bf16 = [layout for layout in LAYOUTS if layout.is_bf16]
    return [
        *(_steps_row(f"H1-{layout.name}", layout, "of its bound") for layout in fp32),
        *(_free_row(layout, "of its bound") for layout in fp32),
        *(_steps_row(f"H2-{layout.name}-steps", layout, "of twice the control's") for layout in bf16),
        *(_free_row(layout, "of twice the control's") for layout in bf16),
        *(_learned_row(layout) for layout in LAYOUTS),
        Row(
            id="H3-mutant",
            what="one expert's gradient x 1.001, the least deviation seen in it over all fp32 layouts",
            unit="of its bound",
            kind="at_least",
            bound=1.0,
            measure=_over(fp32, min, _mutant_share),
        ),
        Row(
            id="H3-control",
            what="stock with each expert in two halves, the worst deviation over all fp32 layouts",
            unit="of its bound",
            kind="at_most",
            bound=1.0,
            measure=_over(fp32, max, lambda verdict: verdict.control_share),
        ),
    ]


def _verdict(context: Context, layout: Layout) -> Verdict:
    return context.once(("proof", layout.name), lambda: prove(layout, data_path=context.data_path))


def _steps_row(row_id: str, layout: Layout, unit: str) -> Row:
    return Row(
        id=row_id,
        what=f"100 steps compared one by one, the worst deviation: {layout.what}",
        unit=unit,
        kind="at_most",
        bound=1.0,
        measure=lambda context: _verdict(context, layout).worst_share,
    )


def _free_row(layout: Layout, unit: str) -> Row:
    return Row(
        id=f"H2-{layout.name}-free",
        what=f"free run of 100 steps, how far losses are from stock's: {layout.what}",
        unit=unit,
        kind="at_most",
        bound=1.0,
        measure=lambda context: _verdict(context, layout).free_share,
    )


def _learned_row(layout: Layout) -> Row:
    def learned(context: Context) -> float:
        run = _verdict(context, layout).free
        assert run is not None
        return run.learned

    return Row(
        id=f"H2-{layout.name}-learned",
        what=f"free run of 100 steps, how far the loss falls: {layout.what}",
        unit="nats",
        kind="at_least",
        bound=LEARNED_NATS,
        measure=learned,
    )


def _over(
    layouts: list[Layout], choose: Callable[[list[float]], float], value: Callable[[Verdict], float]
) -> Callable[[Context], float]:
    return lambda context: choose([value(_verdict(context, layout)) for layout in layouts])


def _mutant_share(verdict: Verdict) -> float:
    """0 where the deviation was not seen in the expert that was made wrong."""
    assert verdict.mutant is not None
    return verdict.mutant.gradient.share if verdict.mutant.caught else 0.0

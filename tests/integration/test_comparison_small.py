"""A comparison with stock as `compare_with_stock.py` makes it, of a tiny model on two ranks."""

import math

from scripts.comparison.result import MEGASCALE, STOCK, paged_name
from scripts.comparison.runner import Plan, compare
from scripts.exactness.layouts import MEGASCALE_FLAGS, select
from scripts.measuring.corpus import standard_library_corpus

BUDGET = "70%"
WARMUP, STEPS, BLOCKS = 1, 4, 2
HIDDEN, FFN, EXPERTS, LAYERS, RANKS, TOKENS, TOP_K = 128, 256, 8, 2, 2, 4 * 64, 2
FP32 = 4


def test_both_sides_take_turns_and_everything_is_counted(tmp_path):
    (layout,) = select("ep2")
    flags = layout.flags(data_path=standard_library_corpus(tmp_path, max_bytes=100_000), steps=WARMUP + STEPS)
    found = compare(
        Plan(
            preset="tiny",
            flags=(*flags, "--eval-interval", "50", "--eval-iters", "1", "--split", "90,10"),
            megascale_flags=MEGASCALE_FLAGS,
            ranks=RANKS,
            threads=1,
            warmup=WARMUP,
            steps=STEPS,
            repeats=BLOCKS,
            validate=True,
            budgets=(BUDGET,),
            disk_path=tmp_path,
        )
    )
    stock, ours = found.run(STOCK), found.run(MEGASCALE)
    assert (stock.made.experts, ours.made.experts) == ("SequentialMLP", "MegaScaleExperts")
    assert stock.made.dispatcher == ours.made.dispatcher == "MoEAlltoAllTokenDispatcher"
    assert stock.made.parameters == ours.made.parameters
    for run in (stock, ours):
        assert [len(block) for block in run.blocks] == [2, 2]
        assert len(run.steps) == WARMUP + STEPS
        assert run.total("page_faults") == 0
        assert all(math.isfinite(step.loss) and step.seconds > 0 for step in run.steps)
        assert run.memory
        assert run.validation_loss is not None
    paged = found.run(paged_name(BUDGET))
    assert [step.loss for step in paged.steps] == [step.loss for step in ours.steps]
    assert paged.validation_loss == ours.validation_loss
    assert paged.total("bytes_read") > 0
    assert paged.total("bytes_written") > 0
    assert found.loss_difference < 1e-5
    assert found.grad_norm_difference < 1e-5
    # Weights, gradients and two moments of every expert, in fp32, once over both ranks.
    weights = LAYERS * EXPERTS * 3 * HIDDEN * FFN
    assert stock.total("expert_state_peak_bytes") == 4 * FP32 * weights
    # A page has as many bytes in every plane, and a short last page fills a slot of full size.
    assert 4 * FP32 * weights <= ours.total("expert_state_peak_bytes") <= 1.25 * 4 * FP32 * weights
    # At least the tokens go to the other rank and come back, forwards and backwards; half of them stay.
    assert stock.sent_bytes_per_step > LAYERS * 4 * (TOKENS * TOP_K / 2) * HIDDEN * FP32 / 2
    assert ours.sent_bytes_per_step <= stock.sent_bytes_per_step * 1.05

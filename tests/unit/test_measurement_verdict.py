"""How deviations are judged: fp32 bounds, bf16 against twice the control, mutant, free runs."""

import math

import pytest

from scripts.exactness.deviations import BOUNDS, Deviation, FreeStep, MutatedStep, ProvedStep
from scripts.exactness.layouts import LAYOUTS, select
from scripts.exactness.report import print_verdicts
from scripts.exactness.verdict import Verdict, judge_free, judge_mutant, judge_steps, worst_of

EXPERT = "0.decoder.layers.0.mlp.experts.local_experts.2."


def layout(*, bf16=False):
    return next(candidate for candidate in LAYOUTS if candidate.is_bf16 == bf16)


def deviations(**values):
    """One of each kind; 0 where nothing else is said."""
    return [Deviation(kind, values.get(kind, 0.0), f"tensor of {kind}") for kind in BOUNDS]


def steps(megascale, control):
    """Two ranks of two steps; the given deviations are those of rank 1's second step."""
    quiet = {"megascale": deviations(), "control": deviations()}
    return [
        [ProvedStep(5.0, quiet), ProvedStep(4.9, quiet)],
        [ProvedStep(5.0, quiet), ProvedStep(4.9, {"megascale": megascale, "control": control})],
    ]


def verdict(*, bf16=False, **parts):
    return Verdict(layout=layout(bf16=bf16), steps=2, seconds=1.0, **parts)


def judged(megascale=None, control=None, *, bf16=False):
    return verdict(bf16=bf16, **judge_steps(steps(deviations(**(megascale or {})), deviations(**(control or {})))))


@pytest.mark.parametrize(
    ("kind", "value", "within"),
    [
        ("loss", 1e-6, True),
        ("loss", 1.1e-6, False),
        ("gradient", 1e-5, True),
        ("gradient", math.nan, False),
        ("update", math.inf, False),
        ("routing", 0.0, True),
        ("routing", 1.0, False),
        ("rounding", 1.0, False),
    ],
)
def test_a_bound_is_kept_or_not(kind, value, within):
    assert Deviation(kind, value, "").within is within


def test_the_worst_is_found_over_all_ranks_and_steps():
    found = judged({"gradient": 3e-6}).megascale["gradient"]
    assert (found.value, found.step, found.rank, found.where) == (3e-6, 2, 1, "tensor of gradient")


def test_what_is_not_a_number_is_the_worst():
    assert math.isnan(worst_of([[[Deviation("loss", math.nan, "")], [Deviation("loss", 1.0, "")]]])["loss"].value)
    assert judged({"loss": math.nan}).worst_share == math.inf


def test_fp32_passes_within_its_bounds_and_not_beyond():
    assert judged({"gradient": 5e-6}).worst_share == pytest.approx(0.5)
    assert judged({"gradient": 5e-6}).passes
    assert not judged({"gradient": 2e-5}).passes
    assert not judged({"routing": 1.0}).passes


def test_a_control_beyond_its_bounds_fails_the_proof():
    assert not judged(control={"update": 2e-5}).passes


def test_bf16_may_deviate_twice_as_far_as_the_control():
    assert judged({"gradient": 2e-2}, {"gradient": 1e-2}, bf16=True).passes
    assert not judged({"gradient": 2.1e-2}, {"gradient": 1e-2}, bf16=True).passes
    assert not judged({"gradient": 1e-9}, bf16=True).passes  # the control does not deviate at all
    assert not judged({"rounding": 1.0}, {"rounding": 1.0}, bf16=True).passes


def test_initial_weights_that_differ_fail_the_proof():
    found = judge_steps(steps(deviations(), deviations()))
    assert not verdict(initial_differences=["rank 0: megascale: a"], **found).passes


def mutated(where, value):
    other = [MutatedStep(None, deviations())]
    return [[MutatedStep(EXPERT, [Deviation("gradient", value, where)])], other]


def test_a_mutant_is_caught_where_it_was_made():
    caught = judge_mutant(mutated(EXPERT + "linear_fc1.weight", 1e-3))
    assert caught.caught
    assert verdict(mutant=caught).passes


@pytest.mark.parametrize(
    ("where", "value"), [(EXPERT + "linear_fc1.weight", 9e-6), ("0.decoder.final_layernorm.weight", 1e-3)]
)
def test_a_mutant_that_is_not_seen_or_seen_elsewhere_fails_the_proof(where, value):
    missed = judge_mutant(mutated(where, value))
    assert not missed.caught
    assert not verdict(mutant=missed).passes


def test_a_mutant_needs_an_expert():
    with pytest.raises(RuntimeError, match="no expert"):
        judge_mutant([[MutatedStep(None, deviations())]])


def free(difference, *, fall=2.0, control=1e-7, initial=()):
    made = [5.5 - fall * min(1.0, step / 10) for step in range(20)]
    return judge_free(
        [FreeStep({"stock": x, "control": x * (1 + control), "megascale": x * (1 + difference)}, {}) for x in made],
        list(initial),
    )


def test_a_free_run_must_learn_and_stay_near():
    assert verdict(free=free(9e-6)).passes
    assert not verdict(free=free(1.1e-5)).passes
    assert not verdict(free=free(9e-6, fall=1.4)).passes
    assert not verdict(free=free(0.0, initial=["rank 0: megascale: a"])).passes
    assert not verdict(free=free(math.nan)).passes


def test_a_free_run_in_bf16_is_held_against_the_control():
    assert verdict(bf16=True, free=free(1.9e-3, control=1e-3)).passes
    assert not verdict(bf16=True, free=free(2.1e-3, control=1e-3)).passes


def test_nothing_proved_is_no_pass():
    assert not verdict().passes


def test_the_report_says_what_went_over_and_where(capsys):
    print_verdicts([judged({"gradient": 2e-5}), judged()])
    printed = capsys.readouterr().out
    assert "gradient deviates by 2e-05 in tensor of gradient at step 2 on rank 1" in printed
    assert printed.count("deviates") == 1


def test_the_json_tells_every_check():
    entry = judged({"gradient": 2e-5}, {"gradient": 1e-6}).as_json()
    assert [check["kind"] for check in entry["checks"]] == list(BOUNDS)
    gradient = entry["checks"][3]
    assert gradient["worst"] == 2e-5
    assert gradient["control"] == 1e-6
    assert gradient["met"] is False
    assert entry["passes"] is False


def test_layouts_are_chosen_by_name():
    assert select("all") == list(LAYOUTS)
    assert [chosen.name for chosen in select("ep2, single")] == ["single", "ep2"]
    with pytest.raises(ValueError, match="layout 'ep3' is unknown"):
        select("single,ep3")


def test_layouts_cover_what_must_be_exact():
    options = " ".join(f"[{chosen.options}]" for chosen in LAYOUTS)
    for option in (
        "--expert-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--num-layers-per-virtual-pipeline-stage",
        "--recompute-granularity full",
        "--use-distributed-optimizer",
        "--calculate-per-token-loss",
        "--bf16",
    ):
        assert option in options
    assert {chosen.ranks for chosen in LAYOUTS} == {1, 2, 4}

"""What a comparison with stock comes to: ratios, differences, JSON, table, picture. No training here."""

import json
import math
from pathlib import Path

import pytest

from scripts.comparison import main as command
from scripts.comparison.expert_state import is_expert_parameter, union_length
from scripts.comparison.limited import Limited, LimitedRun
from scripts.comparison.pictures import draw_scripts
from scripts.comparison.presets import megascale_flags, page_size_bytes, preset_flags
from scripts.comparison.report import print_comparison
from scripts.comparison.result import Comparison, Run
from scripts.comparison.runner import Plan
from scripts.comparison.worker import Made, Step, Totals
from scripts.measuring.environment import measured_environment
from scripts.measuring.memory import MemorySample
from scripts.measuring.tables import plain_table
from scripts.measuring.units import plain_bytes, plain_number, plain_seconds

MIB = 2**20


def run(name, *, slow=1.0, loss=0.0, rss=100 * MIB, state=50 * MIB, norm=1.0):
    """A run of 2 ranks: one step of warm-up, then three blocks of two steps on a machine that gets slower."""
    seconds = [[0.1, 0.1], [0.2, 0.4], [0.3, 0.3]]
    steps = iter(range(7))

    def step(time):
        return Step(loss=5.0 - 0.1 * next(steps) + loss, grad_norm=norm, seconds=slow * time, sent_bytes=10)

    return Run(
        name=name,
        made=Made(experts="SequentialMLP", dispatcher="D", optimizer="O", tokens_per_step=1024, parameters=1000),
        warmup=(step(9.0),),
        blocks=tuple(tuple(step(time) for time in block) for block in seconds),
        sent_bytes_per_step=20.0,
        totals=tuple(Totals(rss, state, page_faults=0, bytes_read=0, bytes_written=0) for _ in range(2)),
        memory=(MemorySample(0.0, 90 * MIB), MemorySample(1.0, 100 * MIB)),
        validation_loss=4.0 + loss,
    )


@pytest.fixture
def comparison():
    ours = run("megascale", slow=0.5, loss=1e-3, rss=90 * MIB, state=25 * MIB, norm=1.01)
    return Comparison(measured_environment(threads=2), "coarse", (run("stock"), ours))


def test_the_json_has_the_fields_that_readers_rely_on(comparison):
    content = json.loads(json.dumps(comparison.as_json()))
    assert set(content) == {
        "environment",
        "preset",
        "runs",
        "ratios",
        "ratios_by_run",
        "max_relative_loss_difference",
        "max_relative_grad_norm_difference",
        "under_memory_limit",
    }
    assert [entry["name"] for entry in content["runs"]] == ["stock", "megascale"]
    assert {
        "name",
        "step_seconds_median",
        "tokens_per_second",
        "peak_rss_bytes",
        "expert_state_resident_peak_bytes",
        "page_faults",
        "bytes_read",
        "bytes_written",
        "collective_bytes",
        "losses",
        "grad_norms",
    } <= set(content["runs"][0])
    assert set(content["ratios"]) == {"speed", "peak_rss", "expert_state"}


def test_times_are_medians_of_measured_steps_only(comparison):
    stock = comparison.as_json()["runs"][0]
    assert stock["step_seconds_median"] == pytest.approx(0.25)  # of 0.1 0.1 0.2 0.3 0.3 0.4, not of the warm-up's 9
    assert stock["tokens_per_second"] == pytest.approx(4096)
    assert stock["measured_steps"] == 6
    assert len(stock["losses"]) == len(stock["grad_norms"]) == 7


def test_ratios_are_of_neighbours_in_time_and_of_all_ranks(comparison):
    ratios = comparison.as_json()["ratios"]
    assert ratios == {"speed": pytest.approx(2.0), "peak_rss": 0.9, "expert_state": 0.5}
    assert comparison.as_json()["runs"][1]["peak_rss_bytes"] == 180 * MIB
    assert comparison.speed.spread == pytest.approx(0.0)


def test_differences_are_the_largest_over_all_steps(comparison):
    content = comparison.as_json()
    assert content["max_relative_loss_difference"] == pytest.approx(1e-3 / 4.4)
    assert content["max_relative_grad_norm_difference"] == pytest.approx(0.01)


def test_a_loss_that_is_no_number_is_no_small_difference(comparison):
    broken = Comparison(
        comparison.environment, "coarse", (run("stock", loss=math.nan), run("megascale", loss=math.nan))
    )
    assert broken.loss_difference == math.inf


def test_the_table_names_the_classes_and_the_machine(comparison, capsys):
    print_comparison(comparison)
    printed = capsys.readouterr().out
    for text in ("stock: SequentialMLP, D, O", "4,096", "180 MiB", "final training loss", "validation loss", "torch 2"):
        assert text in printed


@pytest.fixture
def with_budget(comparison):
    """The same with a third run under a budget, and what became of two under a memory limit."""
    runs = (
        LimitedRun("stock", (), "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
        LimitedRun("megascale 25%", (5.0, 4.9), None),
    )
    paged = run("megascale 25%", slow=2.0, rss=40 * MIB, state=10 * MIB, loss=2e-3)
    limited = Limited(512 * MIB, runs, 0.0)
    return Comparison(comparison.environment, "coarse", (*comparison.runs, paged), limited)


def test_a_run_under_a_budget_has_ratios_of_its_own(with_budget):
    content = json.loads(json.dumps(with_budget.as_json()))
    assert content["ratios"] == content["ratios_by_run"]["megascale"]
    assert content["ratios_by_run"]["megascale 25%"] == {
        "speed": pytest.approx(0.5),
        "peak_rss": 0.4,
        "expert_state": 0.2,
    }
    assert content["max_relative_loss_difference"] == pytest.approx(2e-3 / 4.4)
    limited = content["under_memory_limit"]
    assert limited["limit_bytes"] == 512 * MIB
    assert [entry["out_of_memory"] for entry in limited["runs"]] == [True, False]


def test_the_table_says_what_paging_costs_and_who_dies(with_budget, capsys):
    print_comparison(with_budget)
    printed = capsys.readouterr().out
    for text in (
        "megascale 25%: a step takes 2.00 times stock's, with 0.20 of its expert state in memory",
        "with 512 MiB of private memory a process (heaps and stacks, no shared libraries): stock: out of memory; "
        "megascale 25%: trains (2 steps)",
        "pages read a step",
    ):
        assert text in printed


def test_a_run_that_fails_otherwise_did_not_run_out_of_memory():
    failed = LimitedRun("stock", (), "ValueError: --lr must be positive")
    assert not failed.out_of_memory
    assert failed.describe() == "failed: ValueError: --lr must be positive"
    assert not LimitedRun("stock", (1.0,), None).out_of_memory


@pytest.mark.parametrize("which", ["comparison", "with_budget"])
def test_the_picture_is_written(which, request, tmp_path):
    comparison = request.getfixturevalue(which)
    pictures = pytest.importorskip("scripts.comparison.pictures")
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "picture.png"
    pictures.draw(comparison, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def plan(**changes):
    values = {"preset": "fine", "flags": (), "megascale_flags": (), "ranks": 1, "threads": 2}
    values |= {"warmup": 1, "steps": 7, "repeats": 3, "validate": False}
    return Plan(**{**values, **changes})


def test_a_budget_is_one_more_run():
    with_budgets = plan(flags=("--lr", "1"), megascale_flags=("--x",), budgets=("25%", "1GiB"), disk_path=Path("/d"))
    assert with_budgets.names == ("stock", "megascale", "megascale 25%", "megascale 1GiB")
    assert with_budgets.flags_of("stock") == ["--lr", "1"]
    assert with_budgets.flags_of("megascale") == ["--lr", "1", "--megascale", "--x"]
    paging = ["--megascale-device-budget", "1GiB", "--megascale-disk-path", "/d"]
    assert with_budgets.flags_of("megascale 1GiB") == ["--lr", "1", "--megascale", "--x", *paging]


def test_measured_steps_are_divided_into_blocks():
    assert plan().block_lengths() == [3, 2, 2]
    assert plan(repeats=7).block_lengths() == [1] * 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 2}, "--steps 2 cannot be divided into --repeats 3 blocks"),
        ({"warmup": 0}, "--warmup 0 must be at least 1"),
        ({"ranks": 0}, "--ranks 0 must be at least 1"),
        ({"budgets": ("25%",)}, "give --disk-path"),
        ({"limited_steps": 2}, "give --budget, e.g. 25%"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_the_coarse_preset_has_at_least_four_pages_an_expert(tmp_path):
    yaml = pytest.importorskip("yaml")
    flags = preset_flags("coarse", data_path=tmp_path, train_iters=9, bf16=True)
    config = yaml.safe_load(Path(flags[flags.index("--yaml-cfg") + 1]).read_text())
    elements = 2 * config["hidden_size"] * config["moe_ffn_hidden_size"]
    for bf16, size in ((False, 4), (True, 2)):
        page = page_size_bytes("coarse", bf16=bf16)
        assert elements * size // page >= 4
        assert megascale_flags("coarse", bf16=bf16) == ("--megascale-page-size", str(page))
    assert flags[-1] == "--bf16"
    assert config["seq_length"] * config["global_batch_size"] == 1024


def test_an_unknown_preset_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="preset 'medium' is unknown; there are quickstart, coarse, fine"):
        preset_flags("medium", data_path=tmp_path, train_iters=1)


def test_flags_of_megascale_are_not_given_to_stock():
    given = ["--lr", "1", "--megascale-page-size", "1MiB", "--bf16", "--megascale-prefetch", "none"]
    assert command.split_flags(given) == (
        ["--lr", "1", "--bf16"],
        ["--megascale-page-size", "1MiB", "--megascale-prefetch", "none"],
    )


def test_several_ranks_share_the_experts_and_the_batch(tmp_path):
    args = command._parser().parse_args(["--preset", "fine", "--ranks", "2"])
    flags = command._plan(args, tmp_path, ["--lr", "1"]).flags
    assert flags[flags.index("--expert-model-parallel-size") + 1] == "2"
    assert flags[flags.index("--micro-batch-size") + 1] == "4"
    chosen = command._plan(args, tmp_path, ["--micro-batch-size", "1"]).flags
    assert [chosen[i + 1] for i, word in enumerate(chosen) if word == "--micro-batch-size"] == ["1"]


def test_the_command_reports_a_mistake_in_one_line(tmp_path, capsys):
    assert command.main(["--steps", "0", "--repeats", "0", "--data-path", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "compare_with_stock.py: --steps 0 must be at least 1\n"


@pytest.mark.parametrize("flag", ["--json", "--picture"])
def test_a_result_that_cannot_be_written_is_noticed_before_the_work(tmp_path, capsys, flag):
    (tmp_path / "file").touch()
    for path, reason in ((tmp_path, "it is a folder"), (tmp_path / "file" / "x", "")):
        assert command.main([flag, str(path), "--data-path", str(tmp_path)]) == 1
        assert f"{path} cannot be written: {reason}" in capsys.readouterr().err
    assert sorted(found.name for found in tmp_path.iterdir()) == ["file"]


def test_what_a_comparison_of_megatron_lms_script_would_ignore_is_refused(tmp_path, capsys):
    for flags in (["--budget", "25%"], ["--preset", "fine"], ["--validate"]):
        assert command.main(["--megatron-lm", str(tmp_path), *flags]) == 1
        assert f"{flags[0]} has no effect with --megatron-lm" in capsys.readouterr().err
    assert command.main(["--megatron-lm", str(tmp_path), "--picture", "x.png"]) == 1
    assert "is no checkout of Megatron-LM" in capsys.readouterr().err


def test_the_picture_of_scripts_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    losses, seconds = (dict.fromkeys(("stock", "megascale"), values) for values in ([5.0, 4.0], [0.5]))
    draw_scripts(losses, seconds, title="two steps", path=tmp_path / "new" / "picture.png")
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_routed_experts_are_told_from_shared_ones():
    assert is_expert_parameter("decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight")
    assert not is_expert_parameter("decoder.layers.0.mlp.shared_experts.linear_fc1.weight")
    assert not is_expert_parameter("decoder.layers.0.mlp.router.weight")


def test_memory_that_two_tensors_share_counts_once():
    assert union_length([(0, 10), (5, 12), (5, 8), (20, 21)]) == 13
    assert union_length([(5, 5), (7, 9)]) == 2
    assert union_length([]) == 0


def test_numbers_as_people_read_them():
    assert [plain_number(x) for x in (3, 1234567, 0.25, 12345.6, 1e-7, math.inf)] == [
        "3",
        "1,234,567",
        "0.25",
        "12,346",
        "1.00e-07",
        "inf",
    ]
    assert [plain_bytes(x) for x in (0, 1023, 1536, 3 * 2**30)] == ["0 B", "1023 B", "1.5 KiB", "3 GiB"]
    assert [plain_seconds(x) for x in (0.1234, 12.3, 192)] == ["0.123 s", "12.3 s", "3 min 12 s"]


def test_a_plain_table_aligns_numbers_to_the_right():
    table = plain_table(["name", "value"], [["a", 1], ["longer", 1000], ["-", None]], title="Title")
    assert table.splitlines() == [
        "Title",
        "name    value",
        "------  -----",
        "a           1",
        "longer  1,000",
        "-           -",
    ]
    assert plain_table(["met"], [[True], [False]]).splitlines()[2:] == ["yes", "NO"]

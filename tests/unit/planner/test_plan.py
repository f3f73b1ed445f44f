"""Plans: cards have the published sizes, bytes are those of a run, traffic and words follow from the numbers."""

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from megascale_omni import cli
from megascale_omni.paging.budget import Budget as PageBudget
from megascale_omni.paging.layout import KIB, MIB
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.needs import class_needs
from megascale_omni.paging.recorder import Recorder
from megascale_omni.paging.replay import replay
from megascale_omni.paging.trace import read_trace
from megascale_omni.planner.bandwidth import Disk, measure_disk
from megascale_omni.planner.devices import DEVICES, GIB
from megascale_omni.planner.devices import bandwidth as bytes_a_second
from megascale_omni.planner.models import ModelCard, model_card, read_model
from megascale_omni.planner.plan import break_even_tokens, make_plan
from megascale_omni.planner.prediction import Machine, Run, work_of
from megascale_omni.planner.probe import measure_here, paging_efficiency
from megascale_omni.planner.state import rank_state
from megascale_omni.planner.steps import Work
from megascale_omni.planner.traffic import Traffic, step_traffic, traced_traffic
from scripts.measurements.paging_model import ALL, Model, Task, Trained, batches_of

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SMALL = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_experts": 8,
    "moe_ffn_hidden_size": 1024,
    "swiglu": True,
    "disable_bias_linear": True,
    "seq_length": 128,
    "micro_batch_size": 8,
    "global_batch_size": 8,
}


def card(**changes: object) -> ModelCard:
    return model_card({**SMALL, **changes}, name="small")


def machine(memory: int = 80 * GIB, host: int = 0, disk: float | None = 1e9, device: str = "h100") -> Machine:
    return Machine(DEVICES[device], memory, host, None if disk is None else Disk.of(disk))


# -- cards -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 46.7),
        ("qwen3-30b-a3b", 30.5),
        ("deepseek-v3", 671),
        ("olmoe-1b-7b", 6.92),
        ("megascale-352b", 352),
    ],
)
def test_model_cards_have_the_published_number_of_parameters(name, billions):
    found = read_model(str(CONFIGS / "models" / f"{name}.yaml"))
    assert found.parameters / 1e9 == pytest.approx(billions, rel=0.002)


def test_the_trainers_configuration_and_flags_are_read_alike():
    from_file = read_model(str(CONFIGS / "quickstart.yaml"))
    flags = (
        "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --position-embedding-type rope --swiglu "
        "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --num-experts 8 "
        "--moe-router-topk=2 --moe-ffn-hidden-size 1024 --seq-length 128 --micro-batch-size 8 --global-batch-size 8"
    )
    assert replace(read_model(flags), name="") == replace(from_file, name="")
    assert from_file.parameters == 26_355_968, "as the trainer counts them"


def test_a_file_that_is_no_json_is_named(tmp_path):
    (tmp_path / "model.json").write_text("{num_layers")
    with pytest.raises(ValueError, match=r"--from .*model\.json is not JSON"):
        read_model(str(tmp_path / "model.json"))


def test_layers_with_experts():
    assert card(moe_layer_freq=2).moe_layers == 2
    assert card(moe_layer_freq="[0]*1+[1]*3").moe_layers == 3
    with pytest.raises(ValueError, match="moe_layer_freq speaks of 5 layers, num_layers of 4"):
        card(moe_layer_freq=[0, 1, 1, 1, 1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "there are no experts"),
        ({"moe_layer_freq": "[0]*4"}, "no layer has experts"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_layers": "four"}, "num_layers='four' is not a whole number"),
        ({"moe_router_topk": 9}, "moe_router_topk=9 is more than num_experts=8"),
        ({"micro_batch_size": 0}, "micro_batch_size=0 must be 1 or more"),
        ({"micro_batch_size": 3}, "global_batch_size=8 cannot be divided by micro_batch_size=3"),
        ({"num_layers": 10**8}, "num_layers=100000000 is more than a plan counts"),
        ({"swiglu": "perhaps"}, "swiglu='perhaps' is neither true nor false"),
        ({"moe_shared_expert_intermediate_size": "some"}, "intermediate_size='some' is not a whole number"),
        ({"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size=2: a plan knows no experts"),
        ({"tensor_model_parallel_size": 4}, "tensor_model_parallel_size=4: a plan knows no"),
        ({"context_parallel_size": 2}, "context_parallel_size=2: a plan knows no"),
    ],
)
def test_models_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        card(**changes)


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("page_bytes", [MIB // 2, 16 * MIB])
def test_bytes_are_those_of_a_manager(bf16, page_bytes):
    model = card(bf16=bf16, disable_bias_linear=False)
    state = rank_state(model, page_bytes=page_bytes, expert_parallel=2, pipeline_parallel=2, fp32_gradients=True)
    manager = ExpertManager(device=torch.device("cpu"))
    for module in state.modules:
        manager.add_module(path=str(module.entry.module), layout=module.layout, num_experts=4, dtypes=module.dtypes)
    assert len(manager.modules) == 2
    assert class_needs(manager.modules) == state.needs
    total = sum(m.entry.num_pages * m.slot_class(p).nbytes for m in manager.modules for p in m.dtypes)
    assert state.total_bytes == total
    assert ("master" in state.plane_bytes) is bf16


def test_tiers_take_everything_and_no_more_than_they_have():
    plan = make_plan(card(), machine(memory=2 * GIB, host=100 * MIB), Run(page_bytes=MIB, budget_bytes=150 * MIB))
    assert sum(plan.tier_bytes.values()) == plan.total_page_bytes
    assert plan.tier_bytes["device"] == 150 * MIB
    assert plan.tier_bytes["host"] == 100 * MIB


# -- traffic -----------------------------------------------------------------------------------------------------------


STATE = rank_state(card(), page_bytes=MIB, expert_parallel=1, pipeline_parallel=1, fp32_gradients=True)


def moves(share: float, work: Work) -> Traffic:
    return step_traffic(STATE, work, budget_bytes=int(share * STATE.total_bytes))


def traffic(share: float, *, micro_batches: int = 1, active: float = 1.0) -> float:
    budget = int(share * STATE.total_bytes)
    least = micro_batches > 1  # which is found sooner
    found = step_traffic(STATE, Work(micro_batches, active), budget_bytes=budget, least=least)
    return found.all.loaded_bytes / STATE.total_bytes


def test_traffic_grows_as_the_budget_shrinks_and_with_micro_batches():
    assert traffic(1.0) == 0
    assert 0 < traffic(0.75) < traffic(0.5) < traffic(0.25)
    assert traffic(0.25, micro_batches=2) > traffic(0.25)
    assert traffic(0.25, active=0.25) < 0.5 * traffic(0.25)
    three, five, seven = (traffic(0.25, micro_batches=n) for n in (3, 5, 7))
    assert seven - five == pytest.approx(five - three, rel=0.05), "a straight line"


def test_traffic_of_a_there_and_back_sweep_is_what_does_not_fit():
    """One micro-batch: of 4 planes of state, what is not here comes once a step, or a little more."""
    assert 0.5 <= traffic(0.5) <= 0.8


def test_moments_come_in_the_optimizer_or_with_it_in_the_last_backward():
    after = moves(0.25, Work(1, 1.0))
    assert after.step.loaded_bytes > 0.4 * STATE.total_bytes > after.passes.loaded_bytes
    within = moves(0.25, Work(1, 1.0, gradient_sweep=False, step_in_backward=True))
    assert within.step.loaded_bytes == 0
    moved = [found.all.loaded_bytes + found.all.written_bytes for found in (within, after)]
    assert 0 < moved[0] < moved[1], "gradients never leave before they are applied"


# -- of a recorded run -------------------------------------------------------------------------------------------------


RECORDED = Task(steps=4, modules=2, experts=8, active=3, hidden=64, ffn=64, rows=64, bias=False, evaluate=False)
LIKE_IT = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --num-experts 8 --moe-ffn-hidden-size 64 --swiglu "
    "--disable-bias-linear --moe-router-topk 1 --seq-length 24"
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "run.trace"
    with batches_of(RECORDED):
        model = Model(RECORDED, ALL)
        recorder = Recorder(model.manager, path)
        for number in range(1, RECORDED.steps + 1):
            model.step(number, Trained())
        recorder.close()
    return path


def test_a_trace_tells_what_a_step_moves(recorded):
    trace = read_trace(recorded)
    state = rank_state(
        read_model(LIKE_IT), page_bytes=64 * KIB, expert_parallel=1, pipeline_parallel=1, fp32_gradients=True
    )
    budget = state.total_bytes // 4
    found = traced_traffic(trace, state, budget_bytes=budget)
    whole, least = (replay(trace, policy=p, budget=PageBudget(nbytes=budget), together=True) for p in ("ours", "min"))
    assert found.all.loaded_bytes == pytest.approx(whole.bytes_in / RECORDED.steps)
    assert found.all.written_bytes == pytest.approx(whole.written_bytes / RECORDED.steps)
    assert found.all.loaded_bytes >= least.bytes_in / RECORDED.steps
    with mock.patch("megascale_omni.planner.traffic.MOST_REPLAYED", 0):  # of very many pages, the least
        many = traced_traffic(trace, state, budget_bytes=budget)
    assert many.all.loaded_bytes == pytest.approx(least.bytes_in / RECORDED.steps)
    assert 0 < found.passes.loaded_bytes < found.all.loaded_bytes
    assert traced_traffic(trace, state, budget_bytes=state.total_bytes).all.loaded_bytes == 0


@pytest.mark.parametrize(
    ("change", "flags"),
    [
        ("--num-experts 8", "--num-experts 16"),
        ("--num-layers 2", "--num-layers 3"),
        ("--hidden-size 64", "--hidden-size 32"),
    ],
)
def test_a_trace_of_another_model_is_refused(recorded, capsys, change, flags):
    given = ["plan", f"--from={LIKE_IT.replace(change, flags)}", "--trace", str(recorded), "--page-size", "64KiB"]
    assert cli.main([*given, "--device-memory", "1GiB", "--budget", "50%"]) == 1
    assert "the trace is of another model: 2 modules of 8 experts of 1 pages of" in capsys.readouterr().err
    given[1] = f"--from={LIKE_IT}"
    assert cli.main([*given, "--device-memory", "1GiB", "--budget", "50%"]) == 0


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_step_takes_the_longer_of_computing_and_moving_in_each_of_its_parts():
    plan = make_plan(card(), machine(disk=1e8), Run(page_bytes=MIB, budget_bytes=100 * MIB))
    found = plan.prediction
    assert found is not None
    assert found.step_seconds == max(found.passes.compute_seconds, found.passes.io_seconds) + max(
        found.optimizer.compute_seconds, found.optimizer.io_seconds
    )
    assert found.stall_seconds == pytest.approx(found.step_seconds - found.compute_seconds)
    assert {"step_seconds", "io_seconds", "passes"} <= plan.as_json()["prediction"].keys()  # type: ignore[attr-defined]
    assert work_of(card(), Run(page_bytes=MIB, active_share=0.5)).active_share == 0.5


def test_where_nothing_is_clipped_and_nobody_else_adds_pages_are_stepped_in_the_last_backward():
    run = Run(page_bytes=MIB)
    assert [work_of(card(), run).step_in_backward, work_of(card(), run).gradient_sweep] == [False, False]
    assert work_of(card(clip_grad=0.0), run).step_in_backward
    apart = work_of(card(clip_grad=0.0), replace(run, data_parallel=2))
    assert [apart.step_in_backward, apart.gradient_sweep] == [False, True]
    plan = make_plan(card(clip_grad=0.0), machine(disk=1e8), replace(run, budget_bytes=100 * MIB))
    assert plan.prediction is not None
    assert plan.prediction.optimizer.seconds == 0, "one part"
    with pytest.raises(ValueError, match="small: clip_grad='much' is not a number"):
        card(clip_grad="much")


def test_break_even_is_flops_by_bytes():
    """989 TFLOP/s over 64 GB/s and 450 GB/s."""
    bf16 = card(bf16=True)
    assert break_even_tokens(bf16, machine())["host"] == pytest.approx(15_453, rel=1e-3)
    assert break_even_tokens(bf16, machine(device="gh200"))["host"] == pytest.approx(2_198, rel=1e-3)
    assert "disk" not in break_even_tokens(bf16, machine(disk=None))


def test_what_fits_needs_no_paging_and_what_does_not_is_said():
    fits = make_plan(card(), machine(), Run(page_bytes=MIB))
    assert fits.advised_budget == fits.total_page_bytes
    assert "Everything fits" in fits.words[0]
    too_large = make_plan(card(), machine(memory=64 * MIB), Run(page_bytes=MIB))
    assert too_large.advised_budget is None
    assert too_large.prediction is None
    assert "This does not fit" in too_large.words[0]
    homeless = make_plan(card(), machine(memory=500 * MIB, disk=None), Run(page_bytes=MIB))
    assert any("have no place" in words for words in homeless.words)
    assert homeless.advised_budget == homeless.room_bytes


def test_where_paging_loses_is_said_in_words():
    slow = make_plan(card(), machine(disk=1e8), Run(page_bytes=MIB, budget_bytes=100 * MIB))
    assert slow.prediction is not None
    assert slow.prediction.stall_seconds > 0
    assert slow.prediction.step_seconds == slow.prediction.io_seconds
    assert any("Paging loses here" in words for words in slow.words)
    assert any("pay from" in words for words in slow.words)


def test_what_to_do_instead_is_said():
    """Ranks that hold all pages; and what moves most, where it is the optimizer's state."""
    run = Run(page_bytes=MIB)
    room = machine(memory=500 * MIB, host=4 * GIB, disk=None)
    plan = make_plan(card(), room, run)
    words = next(words for words in plan.words if words.startswith("With --expert-parallel"))
    ranks = int(words.split()[2])
    assert make_plan(card(), room, replace(run, expert_parallel=ranks)).advised_budget == plan.total_page_bytes // ranks
    assert (
        make_plan(card(), room, replace(run, expert_parallel=ranks // 2)).room_bytes
        < plan.total_page_bytes * 2 // ranks
    )
    assert not any("--expert-parallel" in words for words in make_plan(card(), machine(), run).words)
    none = make_plan(card(), machine(memory=64 * MIB, disk=None), run)
    assert not any("The step above" in words for words in none.words), "there is none"
    many = card(global_batch_size=256, micro_batch_size=1)
    passes = make_plan(many, room, replace(run, budget_bytes=60 * MIB))
    assert passes.prediction is not None
    assert passes.prediction.passes.io_seconds > passes.prediction.optimizer.io_seconds
    assert any("Paging loses" in words for words in passes.words)
    assert not any("most of what moves" in words for words in passes.words)


def test_ranks_share_a_batch():
    one, two = (make_plan(card(global_batch_size=16), machine(), Run(page_bytes=MIB, data_parallel=n)) for n in (1, 2))
    assert one.prediction is not None
    assert two.prediction is not None
    assert one.tokens_per_step == two.tokens_per_step == 16 * 128
    assert two.prediction.passes.compute_seconds == pytest.approx(one.prediction.passes.compute_seconds / 2)
    uneven = make_plan(card(), machine(), Run(page_bytes=MIB, data_parallel=2))
    assert uneven.tokens_per_step == 16 * 128
    assert "cannot be divided into micro-batches of 8 on 2 ranks: counted are 16" in uneven.words[0]


def test_budgets_and_layouts_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"a budget of 5 bytes is too small for small: \d+ are needed"):
        make_plan(card(), machine(), Run(page_bytes=MIB, budget_bytes=5))
    with pytest.raises(ValueError, match="8 experts cannot be divided by --expert-parallel 3"):
        make_plan(card(), machine(), Run(page_bytes=MIB, expert_parallel=3))
    with pytest.raises(ValueError, match="--pipeline-parallel 9 is more than the 4 MoE layers"):
        make_plan(card(), machine(), Run(page_bytes=MIB, pipeline_parallel=9))
    with pytest.raises(ValueError, match="3200000000 pages a plane on one rank are more than there can be"):
        make_plan(card(num_experts=800_000_000), machine(), Run(page_bytes=16 * MIB))


# -- the machine, the command ------------------------------------------------------------------------------------------


def test_rates():
    assert bytes_a_second("pcie4", key="--link") == 32e9
    assert bytes_a_second("6GB/s", key="--link") == 6e9
    for bad in ("fast", "0"):
        with pytest.raises(ValueError, match="--link="):
            bytes_a_second(bad, key="--link")


def test_a_disk_is_measured_and_nothing_is_left_behind(tmp_path):
    found = measure_disk(tmp_path, nbytes=8 * MIB, request_bytes=MIB)
    assert min(found.read_bytes_s, found.write_bytes_s, found.mixed_bytes_s) > 1e5
    assert not list(tmp_path.iterdir())


def test_reading_and_writing_side_by_side_take_what_the_mixed_rate_says():
    disk = Disk(read_bytes_s=1.0, write_bytes_s=4.0, mixed_bytes_s=2.0)
    assert disk.seconds(3, 0) == 3
    assert disk.seconds(0, 4) == 1
    assert disk.seconds(3, 3) == 3
    assert disk.seconds(5, 3) == 3 + 2
    assert disk.seconds(3, 7) == 3 + 1
    assert replace(disk, efficiency=0.5).seconds(3, 7) == 8


def test_this_machine_is_measured_with_the_models_own_sizes(tmp_path, capsys, monkeypatch):
    flags = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --num-experts 8 --moe-ffn-hidden-size 128 --swiglu "
        "--disable-bias-linear --moe-router-topk 2 --seq-length 32 --micro-batch-size 2"
    )
    given = ["plan", f"--from={flags}", "--device", "here", "--page-size", "64KiB", "--budget", "50%", "--json"]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert cli.main([*given, "--disk-bandwidth", "auto", "--disk-path", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert [line.split(": ")[1].split(" of ")[0] for line in printed.err.splitlines()] == [
        "measuring steps",
        "measuring the disk",
    ]
    found = json.loads(printed.out)["prediction"]
    assert 0 < found["passes"]["compute_seconds"] < 10
    assert 0 < found["optimizer"]["io_seconds"] < 10
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    card_ = read_model(f"{flags} --bf16")
    with batches_of(RECORDED):
        device = measure_here(card_, page_bytes=64 * KIB).device
        slow, fast = (
            paging_efficiency(card_, Disk.of(rate), here=device, page_bytes=64 * KIB, folder=tmp_path)
            for rate in (1e6, 1e15)
        )
    assert slow == 1.0, "this disk is faster than that"
    assert fast == 1.0, "computing takes longer than such a disk"
    assert not list(tmp_path.iterdir())


def test_the_command_prints_a_plan_and_json(capsys):
    arguments = ["plan", "--from", str(CONFIGS / "quickstart.yaml"), "--page-size", "1MiB", "--budget", "50%"]
    arguments += ["--device-memory", "1GiB", "--host-memory", "1GiB", "--disk-bandwidth", "1GB/s"]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    for part in ("device: H100 80GB", "by plane: weight", "by tier: device", "a step of ", "to hide a load:"):
        assert part in text
    assert cli.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prediction"]["step_seconds"] > 0
    assert (found["device"], found["device_assumed"]) == ("H100 80GB", True)
    assert "assumed" in text
    assert "no place" not in text
    assert cli.main([*arguments[:-2], "--host-memory", "1MiB"]) == 0
    assert ", no place " in capsys.readouterr().out
    assert cli.main([*arguments, "--device", "a100"]) == 0
    assert "device: A100 80GB\n" in capsys.readouterr().out, "nothing is assumed of a device that was named"
    assert sum(found["plane_bytes"].values()) == found["total_page_bytes"] == sum(found["tier_bytes"].values())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--from", "nowhere.yaml"], "--from nowhere.yaml cannot be read"),
        (["--from", "--num-layers 4 --hidden-size 8"], "there are no experts (num_experts)"),
        (["--device", "tpu"], "device 'tpu' is unknown; choose among a100, h100, h200, gh200"),
        (["--active-experts", "many"], "is no percentage of experts"),
        (["--expert-parallel", "0"], "--expert-parallel 0 must be 1 or more"),
        (["--expert-parallel", "2", "--data-parallel", "3"], "--data-parallel 3 is no multiple of --expert-parallel 2"),
        (["--device-memory", "0"], "--device-memory=0 is not more than nothing"),
        (["--from", "--num-layers 2 --num-experts 8 --expert-tensor-parallel-size 2"], "a plan knows no experts"),
        (["--device-memory", "much"], "--device-memory='much' is not a size"),
        (["--flops", "0"], "--flops 0 must be a number of operations a second, more than 0"),
        (["--flops", "nan"], "--flops nan must be a number"),
        (["--from", "--num-layers '4"], "--from: these are no flags (No closing quotation): --num-layers '4"),
    ],
)
def test_mistakes_are_messages(flags, message, capsys):
    given = [] if flags[0] == "--from" else ["--from", str(CONFIGS / "quickstart.yaml")]
    source = [f"--from={flags[1]}"] if flags[0] == "--from" else flags
    assert cli.main(["plan", *given, *source]) == 1
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_json_is_a_message(tmp_path, capsys):
    (tmp_path / "model.json").write_text("{model")
    assert cli.main(["plan", "--from", str(tmp_path / "model.json")]) == 1
    assert "is not JSON: " in capsys.readouterr().err


def test_parallelism_is_the_models_unless_another_is_given(capsys):
    flags = "--num-layers 4 --hidden-size 64 --num-attention-heads 1 --num-experts 8 --expert-model-parallel-size 4"
    total = []
    for more in ([], ["--expert-parallel", "1"]):
        given = ["plan", f"--from={flags} --pipeline-model-parallel-size 2", "--page-size", "64KiB", "--json", *more]
        assert cli.main(given) == 0
        total.append(json.loads(capsys.readouterr().out)["total_page_bytes"])
    assert total[1] == 4 * total[0]
    assert cli.main([*given, "--pipeline-parallel", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["total_page_bytes"] == 8 * total[0]


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIGS / "models").glob("*.yaml")))
def test_every_card_on_every_device_is_planned_in_numbers_that_can_be(name):
    model = read_model(str(CONFIGS / "models" / f"{name}.yaml"))
    for number, device in enumerate(DEVICES.values()):
        ranks, disk = ((1, None), (8, Disk.of(6e9)))[number % 2]
        given = Machine(device, device.memory_bytes, 2**40, disk)
        run = Run(page_bytes=16 * MIB, expert_parallel=ranks, data_parallel=ranks, pipeline_parallel=8)
        numbers: list[float] = []

        def kept(text: str, numbers: list[float] = numbers) -> float:
            numbers.append(float(text))
            return numbers[-1]

        text = json.dumps(make_plan(model, given, run).as_json(), allow_nan=False)
        json.loads(text, parse_float=kept, parse_int=kept)
        assert len(numbers) > 10
        assert min(numbers) >= 0

"""What the simulator must show: crossovers, levels, racks, placement; and the command line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megascale_omni
from megascale_omni.cli import main
from megascale_omni.topology.levels import Topology
from megascale_omni.topology.placement import pairs_of, place
from megascale_omni.topology.routing import Choices, RoutingWriter, records_of, synthetic
from megascale_omni.topology.scaling import micro_batches_of, step_seconds
from megascale_omni.topology.simulate import LayerShape, demand_of, simulate


def choices(ranks: int, *, tokens: int, experts: int, topk: int, kind: str = "uniform") -> list[Choices]:
    return [
        Choices.of_map(synthetic(kind, tokens=tokens, experts=experts, topk=topk, seed=rank))  # type: ignore[arg-type]
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("kind", ["uniform", "zipf", "clusters"])
def test_made_up_routing_gives_every_token_as_many_experts(kind):
    first = synthetic(kind, tokens=300, experts=32, topk=6, seed=1)
    assert (first.sum(1) == 6).all()
    assert np.array_equal(first, synthetic(kind, tokens=300, experts=32, topk=6, seed=1))
    assert not np.array_equal(first, synthetic(kind, tokens=300, experts=32, topk=6, seed=2))
    share = first.sum(0) / first.sum()
    assert (share.max() > 3 / 32) == (kind == "zipf")


@given(st.integers(1, 5), st.sampled_from([1, 2, 3]), st.integers(0, 10**6))
@settings(max_examples=60)
def test_demand_is_what_a_slow_count_says(ranks, local, seed):
    random = np.random.default_rng(seed)
    experts = ranks * local
    maps = [random.random((random.integers(0, 7), experts)) < 0.4 for _ in range(ranks)]
    order = random.permutation(experts)
    slots = tuple(tuple(int(e) for e in order[p * local : (p + 1) * local]) for p in range(ranks))
    demand = demand_of([Choices.of_map(m) for m in maps], slots)
    for p, map_TE in enumerate(maps):
        for q in range(ranks):
            columns = map_TE[:, list(slots[q])]
            assert demand.rows_PP[p, q] == columns.any(1).sum()
            for j in range(local):
                assert demand.counts_PE[p, q * local + j] == columns[:, j].sum()
                assert demand.only_PE[p, q * local + j] == (columns[:, j] & (columns.sum(1) == 1)).sum()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_gather_wins_only_where_a_token_has_more_experts_than_the_group_has_ranks(ranks):
    shape = LayerShape(4096, 64, 1, width=4)  # as wide as probabilities: stock's all-gather returns sums in their dtype
    for topk in (1, 2, 4, 6, 8, 12):
        given_ = choices(ranks, tokens=128, experts=64, topk=topk)
        bytes_of = {name: simulate(name, given_, shape).total_bytes for name in ("alltoall", "allgather", "groups")}
        if topk != ranks:
            assert (bytes_of["allgather"] < bytes_of["alltoall"] * 0.98) == (topk > ranks), topk
        # Each token once: the map and probabilities of all-gather are in the balance only where nearly all go anywhere.
        assert bytes_of["groups"] < 1.01 * min(bytes_of["alltoall"], bytes_of["allgather"])


def test_groups_across_racks_take_about_three_times_as_long_as_inside_one():
    topology = Topology.uniform(128, per_node=8, per_rack=8)
    given_ = choices(8, tokens=1024, experts=64, topk=8)
    found = simulate("groups", given_, LayerShape(4096, 64, 1))
    one_a_node = [8 * i for i in range(8)]  # eight nodes of one rack
    two_racks = [8 * i for i in (0, 1, 2, 3, 8, 9, 10, 11)]
    scattered = found.seconds(topology, one_a_node)
    assert found.seconds(topology, range(8)) < scattered / 3, "inside a node it is faster still"
    assert set(found.bytes_by_level(topology, one_a_node).items()) >= {("device", 0), ("cluster", 0)}
    far = LayerShape(4096, 64, 1)
    apart = Topology.uniform(64, per_node=1, per_rack=1)
    near = Topology.uniform(64, per_node=1, per_rack=64)
    ratio = simulate("groups", given_, far).seconds(apart, range(8)) / found.seconds(near, range(8))
    assert ratio == pytest.approx(3.0, rel=0.2)
    assert found.seconds(topology, two_racks) > scattered


def test_strong_scaling_of_a_pipeline_has_the_published_trend():
    """Utilisation from 240 to 1440 ranks at one batch, published as 32.48 % and 27.89 % (pipelines of 15 nodes)."""
    published = {240: 32.48, 1440: 27.89}
    utilisation = {}
    for ranks in (240, 480, 720, 960, 1440):
        count = micro_batches_of(ranks=ranks, ranks_of_a_pipeline=120, batches=720)
        seconds = step_seconds(micro_batches=count, stages=15, micro_batch_seconds=1.0)
        utilisation[ranks] = count / seconds
    falling = list(utilisation.values())
    assert falling == sorted(falling, reverse=True)
    assert utilisation[1440] / utilisation[240] == pytest.approx(published[1440] / published[240], rel=0.2)
    with pytest.raises(ValueError, match="cannot be divided among pipelines of 120 of 250 ranks"):
        micro_batches_of(ranks=250, ranks_of_a_pipeline=120, batches=720)
    with pytest.raises(ValueError, match="must be 1 or more"):
        step_seconds(micro_batches=0, stages=1, micro_batch_seconds=1.0)


def test_placement_by_co_activation_saves_trips():
    given_ = choices(4, tokens=1024, experts=64, topk=8, kind="clusters")
    shape = LayerShape(256, 64, 1, width=4)
    other = [synthetic("clusters", tokens=1024, experts=64, topk=8, seed=100 + r) for r in range(4)]
    slots = place(np.sum([pairs_of(m) for m in other], axis=0), ranks=4)
    stock = min(simulate(name, given_, shape).total_bytes for name in ("alltoall", "allgather"))
    assert simulate("groups", given_, shape, slots=slots).total_bytes < 0.6 * stock
    assert simulate("groups", given_, shape).total_bytes > 0.75 * stock


# --- the command ------------------------------------------------------------------------------------------------------

SMALL = ["--expert-parallel", "4", "--tokens", "64", "--experts", "16", "--topk", "2", "--hidden", "64", "--ffn", "32"]


def record(folder: Path, *, ranks: int, layers: int = 2) -> None:
    for rank in range(ranks):
        writer = RoutingWriter(folder, rank=rank, world=ranks)
        for layer in range(1, layers + 1):
            for step in range(3):
                seed = 1000 * layer + 10 * step + rank
                writer.write(layer, step, synthetic("clusters", tokens=256, experts=16, topk=2, seed=seed))
        writer.close()


def test_simulating_1440_ranks_says_bytes_and_seconds_by_level(capsys):
    assert main(["topology", "simulate", "--ranks", "1440", "--json", *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 1440
    for one in found["dispatchers"].values():
        assert sum(one["bytes_by_level"].values()) == one["bytes"] > 0
        assert one["seconds"] > 0
    assert found["groups_over_better_stock"]["bytes"] < 1
    assert main(["topology", "simulate", "--ranks", "16", *SMALL]) == 0
    assert "groups / the better stock dispatcher, bytes" in capsys.readouterr().out


def test_a_group_of_all_1440_ranks_can_be_simulated():
    given_ = choices(1440, tokens=8, experts=1440, topk=8)
    found = simulate("groups", given_, LayerShape(64, 1440, 1), discovery="gossip")
    assert [e.what for e in found.exchanges][:11] == [f"counts, round {i + 1}" for i in range(11)]
    assert found.seconds(Topology.uniform(1440)) > 0


def test_plan_show_recompile_and_simulate_work_on_each_others_files(tmp_path, capsys):
    record(tmp_path / "routing", ranks=4)
    topology = tmp_path / "topology.json"
    Topology.uniform(4, per_node=2, per_rack=1).write(topology)
    plan = ["topology", "plan", "--routing", str(tmp_path / "routing"), "--topology", str(topology)]
    assert main([*plan, "--expert-parallel", "4", "--output", str(tmp_path / "placement.yaml")]) == 0
    told = capsys.readouterr().out
    assert told.count("trips a token to other ranks") == 2
    simulated = ["topology", "simulate", "--topology", str(topology), "--routing", str(tmp_path / "routing"), "--json"]
    ratios = []
    for placement in ([], ["--placement", str(tmp_path / "placement.yaml")]):
        assert main([*simulated, "--expert-parallel", "4", "--layer", "2", "--hidden", "64", *placement]) == 0
        ratios.append(json.loads(capsys.readouterr().out)["groups_over_better_stock"]["bytes"])
    assert ratios[1] < 0.7 * ratios[0]
    add = ["topology", "recompile", "--existing-topology", str(topology), "--new-node-gpu-count", "4"]
    assert main([*add, "--new-node-ip", "10.0.0.9", "--new-node-in", "rack=rack0"]) == 0
    grown = Topology.from_file(topology)
    assert grown.num_ranks == 8
    assert grown.level_PP()[0, 7] == 1
    assert main(["topology", "show", str(topology), "--expert-parallel", "4"]) == 0
    assert "groups of 4 inside device: 1 of ranks in a row, 1 at best" in capsys.readouterr().out
    again = [*plan, "--expert-parallel", "8", "--placement", str(tmp_path / "placement.yaml")]
    assert main([*again, "--output", str(tmp_path / "grown.yaml")]) == 0
    moved = [int(n) for n in re.findall(r"(\d+) experts move", capsys.readouterr().out)]
    assert all(8 <= count <= 14 for count in moved), "half go to the new ranks; no plan moves all"
    assert len(moved) == 2


def test_what_more_ranks_recorded_before_is_gone(tmp_path):
    for ranks in (4, 2):
        record(tmp_path, ranks=ranks, layers=1)
        assert [path.name for path in records_of(tmp_path)] == [f"routing-{rank:05d}.bin" for rank in range(ranks)]


def test_recompiling_from_python_gives_a_node_of_its_own():
    before = Topology.uniform(16)
    after = megascale_omni.recompile_nccl_topology(before, new_node_ip="10.0.0.7", new_node_gpu_count=8)  # type: ignore[operator]
    assert after.num_ranks == 24
    assert after.level_PP()[0, 23] == 2


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("simulate --ranks 12 --expert-parallel 8", "12 ranks in groups of 8 on a topology of 12: choose a divisor"),
        ("simulate", "--ranks=None: give a number of ranks, or a --topology"),
        ("simulate --ranks 8 --routing nowhere", "nowhere has no record of routing"),
        ("simulate --ranks 8 --topk 99", "--topk=99 must be 1 to --experts=64"),
        ("simulate --ranks 8 --experts 60", "60 experts cannot be divided among 8 ranks evenly"),
        ("simulate --ranks 8 --expert-parallel 0", "8 ranks in groups of 0"),
        ("simulate --ranks 9000000000", "topology of 9000000000 ranks: choose 1 to 1048576"),
        ("simulate --ranks 8 --tokens 9000000000", "--tokens x --experts: 576,000,000,000 numbers are more than"),
        ("simulate --ranks 65536 --expert-parallel 65536 --experts 65536 --tokens 1", "--expert-parallel squared"),
        ("simulate --ranks 1440 --expert-parallel 1440 --experts 1440 --move pages", "--expert-parallel squared"),
        ("simulate --ranks 8 --hidden -5", "--hidden=-5, --ffn=1536: a layer has 1 or more of each"),
        ("probe --output x.yaml", "start it with torchrun"),
        ("plan --routing nowhere --expert-parallel 2 --output x", "nowhere has no record of routing"),
        ("show nothing.yaml", "topology file nothing.yaml cannot be read"),
        (
            "recompile --existing-topology nothing.json --new-node-ip a --new-node-gpu-count 8",
            "topology file nothing.json cannot be read",
        ),
    ],
)
def test_mistakes_are_told(command, message, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert main(["topology", *command.split()]) == 1
    assert message in capsys.readouterr().err


def test_a_unit_that_is_none_is_refused(tmp_path, capsys):
    Topology.uniform(8).write(tmp_path / "t.json")
    add = ["topology", "recompile", "--existing-topology", str(tmp_path / "t.json"), "--new-node-gpu-count", "8"]
    assert main([*add, "--new-node-ip", "b", "--new-node-in", "rack"]) == 1
    assert "--new-node-in rack is not LEVEL=UNIT" in capsys.readouterr().err
    assert main([*add, "--new-node-ip", "node0"]) == 1
    assert "none twice" in capsys.readouterr().err


def test_the_command_needs_no_training_framework():
    code = (
        "import sys; from megascale_omni.cli import main; main(['topology','simulate','--ranks','8','--tokens','8']);"
    )
    code += "assert not [m for m in sys.modules if m.startswith('megatron')]"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), timeout=60
    )
    assert done.returncode == 0, done.stderr

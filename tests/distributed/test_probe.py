"""Probing links between real processes; hosts are what the ranks say."""

import pytest

from megascale_omni.topology.levels import Topology
from megascale_omni.topology.probe import probe


def probe_hosts(rank: int, world: int, *, hosts: list[str], racks: list[str]) -> object:
    try:
        found, missing = probe(hosts[rank], {"rack": racks[rank]} if racks else None)
    except ValueError as error:
        return str(error)
    return found.as_mapping(), missing


def test_levels_between_ranks_are_measured_and_all_ranks_hear_the_same(pools):
    answers = pools[4].run(probe_hosts, hosts=["a", "a", "b", "c"], racks=["x", "x", "x", "y"])
    assert all(answer == answers[0] for answer in answers)
    mapping, missing = answers[0]
    assert missing == []
    assert [node["host"] for node in mapping["nodes"]] == ["a", "b", "c"]
    assert [level["name"] for level in mapping["levels"]] == ["device", "rack", "cluster"]
    assert all(level["bandwidth"] > 1e6 and 0 < level["latency"] < 1 for level in mapping["levels"])


@pytest.mark.parametrize(
    ("hosts", "missing"), [(["a", "a"], ["cluster"]), (["a", "b"], ["device"])], ids=["one host", "a rank a host"]
)
def test_levels_that_no_two_ranks_share_get_the_figures_of_the_next(pools, hosts, missing):
    (mapping, found), _ = pools[2].run(probe_hosts, hosts=hosts, racks=[])
    assert found == missing
    assert mapping["levels"][0]["bandwidth"] == mapping["levels"][1]["bandwidth"] > 1e6


def test_ranks_that_are_not_numbered_node_by_node_are_refused(pools):
    answers = pools[4].run(probe_hosts, hosts=["a", "b", "a", "b"], racks=[])
    assert set(answers) == {"ranks of host a are not numbered one after the other; start them node by node"}


def test_one_rank_alone_has_no_links(pools):
    (answer,) = pools[1].run(probe_hosts, hosts=["a"], racks=[])
    assert answer.startswith("one rank has no links to measure; start two or more")


def probe_by_command(rank: int, world: int, *, path: str) -> int:
    from megascale_omni.cli import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))
        return main(["topology", "probe", "--output", path, "--in", "rack=a"])


def test_the_command_writes_what_a_run_can_read(pools, tmp_path):
    path = tmp_path / "topology.yaml"
    assert pools[2].run(probe_by_command, path=str(path)) == [0, 0]
    topology = Topology.from_file(path)
    assert topology.num_ranks == 2
    assert [level.name for level in topology.levels] == ["device", "rack", "cluster"]
    assert topology.link_costs().seconds_per_byte_PP[0, 1] > 0

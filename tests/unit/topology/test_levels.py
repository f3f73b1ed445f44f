"""Topologies: files, levels between ranks, groups inside the lowest level that holds them, and what is refused."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_omni.topology.levels import DEFAULT_LEVELS, Level, Node, Topology
from megascale_omni.topology.placement import groups_by_level

YAML = """
levels:
  - {name: device, bandwidth: 200 GB/s, latency: 2us}
  - {name: rack, bandwidth: 50e9, latency: 0.005 ms}
  - {name: cluster, bandwidth: 16 GB/s}
nodes:
  - {host: a, ranks: 2, in: {rack: left}}
  - {host: b, ranks: 1, in: {rack: left}}
  - {host: c, ranks: 1, in: {rack: right}}
"""


def test_levels_join_ranks_by_the_narrowest_unit_that_they_share(tmp_path):
    path = tmp_path / "topology.yaml"
    path.write_text(YAML)
    topology = Topology.from_file(path)
    assert topology.num_ranks == 4
    assert topology.level_PP().tolist() == [[-1, 0, 1, 2], [0, -1, 1, 2], [1, 1, -1, 2], [2, 2, 2, -1]]
    links = topology.link_costs([3, 0])
    assert links.seconds_per_byte_PP.tolist() == [[0, 1 / 16e9], [1 / 16e9, 0]]
    assert topology.link_costs().latency_PP[0].tolist() == pytest.approx([0, 2e-6, 5e-6, 0])
    for name in ("again.json", "again.yaml"):
        topology.write(tmp_path / name)
        assert Topology.from_file(tmp_path / name) == topology
    json.loads((tmp_path / "again.json").read_text())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("levels:", "level:", "a topology has the keys levels and nodes, not ['level', 'nodes']"),
        ("50e9", "fast", "'fast' is not a quantity; write e.g. 50 GB/s"),
        ("50e9", "50 GW", "'50 GW' is not a quantity"),
        ("16 GB/s", "0", "topology level cluster: bandwidth=0 must be above 0"),
        ("50e9", ".inf", "topology level rack: bandwidth=inf must be above 0"),
        ("2us", ".inf", "latency=inf not below, both finite"),
        ("ranks: 2", "ranks: 2000000000", "topology of 2000000002 ranks: 1048576 are the most"),
        ("ranks: 2", "ranks: &again [*again]", "ranks must be a whole number"),
        ("ranks: 2", "ranks: 0", "topology node a: ranks=0 must be 1 or more"),
        ("ranks: 2", "ranks: two", "ranks must be a whole number"),
        ("in: {rack: right}", "in: {pod: right}", "must say which unit of ['rack'] it is in"),
        ("host: b", "host: a", "must be one or more hosts, none twice"),
        ("name: cluster", "name: rack", "none twice"),
        ("name: cluster", "nam: cluster", "must have ['bandwidth', 'name'] and may have ['latency']"),
        ("{host: a", "{{host: a", "is not valid"),
    ],
)
def test_a_bad_file_is_refused_by_what_is_wrong(tmp_path, old, new, message):
    path = tmp_path / "topology.yaml"
    path.write_text(YAML.replace(old, new))
    with pytest.raises(ValueError) as error:
        Topology.from_file(path)
    assert message in str(error.value)


def test_a_missing_file_and_a_rank_that_is_not_there_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"topology file .*none\.yaml cannot be read"):
        Topology.from_file(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match="topology has 8 ranks, and rank 9 was asked for; add its node"):
        Topology.uniform(8).link_costs([0, 9])


def test_ranks_keep_their_numbers_when_nodes_are_added():
    before = Topology.uniform(16, per_node=4, per_rack=2)
    after = before.with_nodes([Node("new", 4, {"rack": "rack9"})])
    assert np.array_equal(after.level_PP()[:16, :16], before.level_PP())
    assert set(after.level_PP()[16:, :16].ravel().tolist()) == {2}


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from("abc")), min_size=1, max_size=8), st.integers(1, 6), st.data()
)
def test_every_group_is_inside_the_lowest_level_that_holds_it(nodes, size, data):
    units = [Node(f"n{i}", ranks, {"rack": rack}) for i, (ranks, rack) in enumerate(nodes)]
    topology = Topology(DEFAULT_LEVELS, tuple(units))
    if topology.num_ranks % size:
        with pytest.raises(ValueError, match=f"cannot form groups of {size}; choose a divisor"):
            groups_by_level(topology, size)
        return
    groups = groups_by_level(topology, size)
    assert sorted(rank for ranks, _ in groups for rank in ranks) == list(range(topology.num_ranks))
    level_PP = topology.level_PP()
    for ranks, name in groups:
        widest = max(0, int(level_PP[np.ix_(ranks, ranks)].max()))
        assert topology.levels[widest].name == name or size == 1
    for number, level in enumerate(topology.levels):  # no unit could have held one more group
        inside = [ranks for ranks, name in groups if [v.name for v in topology.levels].index(name) <= number]
        for unit in set(topology.units_of(number, range(topology.num_ranks)).tolist()):
            members = np.nonzero(topology.units_of(number, range(topology.num_ranks)) == unit)[0]
            held = sum(set(ranks) <= set(members.tolist()) for ranks in inside)
            assert held == len(members) // size, (level, unit)


def test_two_levels_are_enough_and_one_is_not():
    Topology((Level("node", 1e9), Level("net", 1e8)), (Node("a", 2), Node("b", 2)))
    with pytest.raises(ValueError, match="two or more names"):
        Topology((Level("node", 1e9),), (Node("a", 2),))
    with pytest.raises(ValueError, match="between node, which is the node, and net, which holds everything"):
        Topology((Level("node", 1e9), Level("net", 1e8)), (Node("a", 2, {"rack": "x"}),))


def test_levels_in_the_wrong_order_are_doubted():
    nodes = (Node("a", 2), Node("b", 2))
    assert Topology((Level("node", 1e9), Level("net", 1.1e9)), nodes).doubts == []
    (doubt,) = Topology((Level("net", 1e8), Level("node", 1e9)), nodes).doubts
    assert doubt == "level node is faster than net, which is inside it; are levels listed innermost first?"

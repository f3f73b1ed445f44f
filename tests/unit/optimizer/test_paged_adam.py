"""Deferred Adam on pages has the bits of the dense optimizer on whole tensors, whenever its state is read."""

import itertools

import pytest
import torch

from megascale_omni.experts.shards import PageShards
from megascale_omni.optimizer.arithmetic import arithmetic_for
from megascale_omni.optimizer.paged_adam import MOMENTS, GroupBinding, PagedAdam
from megascale_omni.optimizer.state_tensors import master_plane
from megascale_omni.paging.planes import Plane
from scripts.measurements.paging_adam import CASES, Pair, Tensors, compare, differing, pair_of, schedule
from tests.unit.experts.paged import small_experts


@pytest.mark.parametrize("name", CASES)
def test_seldom_active_experts_have_the_bits_of_dense_steps(name, tmp_path, seed):
    case = CASES[name]
    found = compare(case, tmp_path, steps=200 if case.max_lag else 60, seed=seed)
    assert found.differences == ()
    assert min(20, case.max_lag - 1) <= found.lag < max(1, case.max_lag)  # before the step that ends it
    assert found.records <= 2 * max(1, case.max_lag)  # of two groups: what every page has seen is forgotten
    assert (found.loaded > 20) == case.paged


def test_the_comparison_sees_one_bit(tmp_path):
    with pair_of(CASES["AdamW"], tmp_path) as pair:
        pair.step([1])
        pair.dense.params["local_experts.5.linear_fc1.bias"].data[3] *= 1 + 2**-23
        assert pair.differences() == ["weight of local_experts.5.linear_fc1.bias"]


# -- whoever reads -----------------------------------------------------------------------------------------------------


def read_by_waves(pair: Pair) -> Tensors:
    """What the products of a forward read."""
    seen = {t.name: torch.full(t.shape, torch.nan, dtype=pair.case.dtype) for t in pair.experts.names.tensors()}
    for wave in pair.manager.waves(pair.experts.pages, range(pair.experts.num_experts), planes=(Plane.WEIGHT,)):
        pages = {item: wave.leases[Plane.WEIGHT].page(*item) for item in wave.items}
        pair.experts.names.gather(pages, seen)
    return seen


READERS = {
    "waves": read_by_waves,
    "dense": lambda pair: pair.experts.dense(),
    "state dict": lambda pair: dict(pair.experts.state_dict()),
    "optimizer's dense": lambda pair: pair.adam.tensors.dense(pair.experts, Plane.WEIGHT),
}


@pytest.mark.parametrize("name", ["AdamW", "L2 bf16 lag 7"])
@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_weights_reads_them_caught_up(name, reader, tmp_path):
    with pair_of(CASES[name], tmp_path) as pair:
        pair.step([1, 4])
        for _ in range(4):
            pair.step([4])
        assert min(pair.last_steps) < 5
        assert differing(READERS[reader](pair), pair.dense.plane(Plane.WEIGHT)) == []
        assert set(pair.last_steps) == {5}
        pair.step([])
        assert pair.differences() == []


@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_catches_up_the_experts_it_reads_and_no_others(tmp_path, inference):
    with pair_of(CASES["AdamW"], tmp_path) as pair:
        for _ in range(3):
            pair.step([0])
        counts = [0, 0, 5, 0, 0, 1, 0, 0]
        with inference():
            pair.experts(torch.randn(6, 24), counts, torch.rand(6))
        slices = pair.experts.layout.num_slices
        steps = [set(pair.last_steps[e * slices : (e + 1) * slices]) for e in range(8)]
        assert steps == [{3}, {0}, {3}, {0}, {0}, {3}, {0}, {0}]
        pair.step([2, 3])
        assert pair.differences() == []


def test_parts_of_pages_are_read_caught_up_and_what_is_written_to_them_stays(tmp_path):
    with pair_of(CASES["AdamW"], tmp_path) as pair:
        pair.step([2])
        pair.step([3])
        with torch.no_grad():
            for item, view in pair.experts.named_slices(write=True):
                expected = item.select(pair.dense.params[item.tensor.name].detach())
                assert view.equal(expected)
                view.mul_(0.5)
                expected.mul_(0.5)
        for active in ([], [3], [5]):
            pair.step(active)
        assert pair.differences() == []


def test_norms_of_parameters_are_those_of_caught_up_masters(tmp_path):
    with pair_of(CASES["AdamW bf16"], tmp_path) as pair:
        before = pair.adam.tensors.squared_parameter_norm(pair.experts)
        for _ in range(4):
            pair.step([1], settings=[{**group, "lr": 0.1, "weight_decay": 0.5} for group in schedule(1)])
        found = pair.adam.tensors.squared_parameter_norm(pair.experts)
        expected = sum(float(t.double().square().sum()) for t in pair.dense.plane(Plane.MASTER).values())
        assert found == pytest.approx(expected, rel=1e-6)
        assert found != pytest.approx(before, rel=1e-2)


def test_all_pages_are_caught_up_where_it_is_asked_for(tmp_path):
    with pair_of(CASES["AdamW bf16"], tmp_path) as pair:
        for _ in range(9):
            pair.step([0])
        assert min(pair.last_steps) == 0
        pair.adam.catch_up_all()
        assert set(pair.last_steps) == {9}
        assert pair.differences() == []


# -- moments -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "AdamW bf16 lag 7"])
def test_experts_that_never_had_a_token_have_no_moments(name, tmp_path):
    with pair_of(CASES[name], tmp_path) as pair:
        for _ in range(105 if name == "AdamW" else 20):  # beyond the lag: all pages were stepped
            pair.step([1])
        for plane in MOMENTS:
            present = pair.manager.present(pair.experts.pages, plane)
            assert present.tolist() == [[expert == 1] * present.shape[1] for expert in range(8)]
        assert pair.differences() == []


def test_weight_decay_that_is_a_part_of_the_gradient_makes_moments_without_tokens(tmp_path):
    with pair_of(CASES["L2"], tmp_path) as pair:
        for _ in range(3):
            pair.step([])
        assert pair.differences() == []
        assert all(pair.manager.present(pair.experts.pages, plane).all() for plane in MOMENTS)
        pair.step([0])
        assert pair.differences() == []


def test_without_any_decay_experts_without_tokens_do_not_change(tmp_path):
    still = [{**group, "weight_decay": 0.0} for group in schedule(10)]
    with pair_of(CASES["L2"], tmp_path) as pair:
        before = pair.experts.dense()
        for _ in range(5):
            pair.step([0], settings=still)
        assert pair.differences() == []
        assert differing(pair.experts.dense(), before) == [name for name in before if ".0." in name]
        assert not pair.manager.present(pair.experts.pages, Plane.MOMENT1)[1:].any()


def test_active_then_not_then_active_again(tmp_path):
    with pair_of(CASES["AdamW"], tmp_path) as pair:
        for active in ([0, 1], [1], [], [1], [0], [], [0, 1]):
            pair.step(active)
        assert pair.differences() == []


# -- more than one optimizer -------------------------------------------------------------------------------------------


def test_a_run_that_is_resumed_goes_on_with_its_bits(tmp_path):
    """State read out, moments gone, state loaded into a new optimizer: as a checkpoint does."""
    with pair_of(CASES["AdamW bf16"], tmp_path) as pair:
        for active in ([0, 1], [2], []):
            pair.step(active)
        state = {plane: pair.adam.tensors.dense(pair.experts, plane) for plane in pair.planes}
        for plane in MOMENTS:
            pair.manager.drop(pair.manager.ids(pair.experts.pages, plane, [0, 1, 2]))
        pair.adam = pair.new_optimizer()
        for plane, tensors in state.items():
            pair.adam.tensors.load_dense(pair.experts, plane, tensors)
        pair.adam.set_num_steps(3)
        assert pair.differences() == []
        for active in ([1], [], [0, 3]):
            pair.step(active)
        assert pair.differences() == []


def test_another_optimizer_takes_over_pages_that_are_up_to_date(tmp_path):
    with pair_of(CASES["AdamW"], tmp_path) as pair:
        pair.step([0, 1])
        pair.step([0])
        assert pair.new_optimizer().num_steps == 0
        assert differing(pair.experts.dense(), pair.dense.plane(Plane.WEIGHT)) == []
        assert set(pair.last_steps) == {0}


def test_two_optimizers_of_one_manager_catch_up_their_own_modules(tmp_path):
    with pair_of(CASES["AdamW"], tmp_path) as pair:
        other = small_experts(num_experts=2, bias=True, manager=pair.manager)
        for plane in MOMENTS:
            pair.manager.set_plane_dtype(other.pages, plane, torch.float32)
        before = other.dense()
        second = PagedAdam(
            [(other, GroupBinding(weights=0, biases=1))],
            groups=schedule(9),
            arithmetic=arithmetic_for(decoupled=True, fused=False),
            shards=PageShards(),
        )
        for _ in range(3):
            pair.step([0])
        assert pair.differences() == []
        assert differing(other.dense(), before) == []
        second.step()
        assert len(differing(other.dense(), before)) > 0


def test_the_plane_that_is_stepped_is_the_master_where_there_is_one(tmp_path):
    for name, plane in (("AdamW", Plane.WEIGHT), ("AdamW bf16", Plane.MASTER)):
        with pair_of(CASES[name], tmp_path) as pair:
            assert master_plane(pair.experts) is plane


def test_every_setting_changes_within_the_steps_that_are_compared():
    settings = list(itertools.chain.from_iterable(schedule(step) for step in range(1, 61)))
    for key, least in (("lr", 100), ("weight_decay", 4), ("betas", 4), ("eps", 2)):
        assert len({group[key] for group in settings}) >= least

"""PagedExperts is a module to everyone else: names, shapes, counts, state dict, freezing; no Parameters."""

import pytest
import torch

from megascale_omni.experts.activation import Activation
from megascale_omni.paging.names import NamingStyle
from megascale_omni.paging.planes import Plane
from megascale_omni.paging.tiers import SEGMENT_BYTES
from tests.unit.experts.paged import FFN, GELU, HIDDEN, SWIGLU, random_batch, small_experts

STYLES: list[NamingStyle] = ["sequential", "te_grouped", "hf", "hf_gpt_oss"]


class Layer(torch.nn.Module):
    """Something around the experts, so that their state dict has a prefix."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.router = torch.nn.Linear(HIDDEN, 4)
        self.experts = small_experts(**options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("style", STYLES)
def test_a_state_dict_makes_the_same_experts_again(style, dtype):
    source, target = (Layer(style=style, bias=True, dtype=dtype) for _ in range(2))
    state = source.state_dict()
    expected = {f"experts.{t.name}": t.shape for t in source.experts.names.tensors()}
    assert {n: tuple(t.shape) for n, t in state.items() if n.startswith("experts.")} == expected
    batch = random_batch((3, 0, 4, 1), dtype=dtype)
    with torch.no_grad():
        before = target.experts(batch.x, batch.counts, batch.probs)
        target.load_state_dict(state)
        outputs = [layer.experts(batch.x, batch.counts, batch.probs) for layer in (source, target)]
    assert outputs[1].equal(outputs[0])
    assert not outputs[1].equal(before)
    assert all(tensor.equal(state[name]) for name, tensor in target.state_dict().items())


def test_a_state_dict_crosses_page_sizes():
    source, target = Layer(bias=True, rows=16), Layer(bias=True, rows=FFN)
    target.load_state_dict(source.state_dict())
    assert all(tensor.equal(source.state_dict()[name]) for name, tensor in target.state_dict().items())


def test_a_state_dict_is_a_copy():
    layer = Layer()
    state = layer.state_dict()
    with torch.no_grad():
        for _, view in layer.experts.named_slices(write=True):
            view.zero_()
    assert state["experts.local_experts.0.linear_fc1.weight"].abs().sum() > 0
    assert layer.state_dict()["experts.local_experts.0.linear_fc1.weight"].abs().sum() == 0


def test_missing_and_unexpected_tensors_are_named():
    layer = Layer()
    state = layer.state_dict()
    state["experts.weight9"] = state.pop("experts.local_experts.1.linear_fc2.weight")
    with pytest.raises(RuntimeError) as error:
        layer.load_state_dict(state)
    assert 'Missing key(s) in state_dict: "experts.local_experts.1.linear_fc2.weight"' in str(error.value)
    assert 'Unexpected key(s) in state_dict: "experts.weight9"' in str(error.value)
    found = layer.load_state_dict(state, strict=False)
    assert found.missing_keys == ["experts.local_experts.1.linear_fc2.weight"]
    assert found.unexpected_keys == ["experts.weight9"]


def test_a_tensor_of_another_shape_is_refused_and_nothing_of_the_experts_is_loaded():
    layer = Layer()
    before = layer.experts.dense()
    state = {name: torch.zeros_like(tensor) for name, tensor in layer.state_dict().items()}
    state["experts.local_experts.3.linear_fc1.weight"] = torch.zeros(2 * FFN, HIDDEN + 1)
    with pytest.raises(
        RuntimeError, match=r"linear_fc1\.weight: shape \(80, 25\) does not fit, the model has \(80, 24\)"
    ):
        layer.load_state_dict(state)
    assert all(tensor.equal(before[name]) for name, tensor in layer.experts.dense().items())


def test_loading_a_name_that_the_experts_do_not_have_is_refused():
    with pytest.raises(ValueError, match=r"module0\.experts has no tensor 'weight1'; it has local_experts\.0\."):
        small_experts().load_dense({"weight1": torch.zeros(1)})


def test_some_tensors_alone_can_be_loaded():
    experts = small_experts()
    before = experts.dense()
    name = "local_experts.2.linear_fc2.weight"
    experts.load_dense({name: torch.zeros(HIDDEN, FFN)})
    assert [n for n, tensor in experts.dense().items() if not tensor.equal(before[n])] == [name]


def test_named_slices_are_views_that_write_through():
    experts = small_experts(bias=True)
    before = experts.dense()
    with torch.no_grad():
        for item, view in experts.named_slices(write=True):
            if item.expert == 1:
                view.mul_(2)
    for name, tensor in experts.dense().items():
        assert tensor.equal(before[name] * (2 if ".1." in name else 1)), name
    assert not experts.manager.table.pins.any()


def test_there_are_no_parameters_but_they_are_counted():
    for options in ({"bias": True}, {"activation": GELU}):
        experts = small_experts(**options)
        assert list(experts.parameters()) == []
        assert experts.num_parameters == sum(tensor.numel() for tensor in experts.dense().values())


def test_an_activation_that_does_not_fit_the_shape_is_refused():
    experts = small_experts(SWIGLU)
    with pytest.raises(ValueError, match="other: activation gated=False, expert shape gated=True"):
        type(experts)(
            manager=experts.manager,
            path="other",
            layout=experts.layout,
            num_experts=4,
            dtypes={Plane.WEIGHT: torch.float32},
            activation=Activation("gelu", gated=False),
            style="sequential",
            products=experts.context.products,
            workspace=experts.context.workspace,
        )
    assert len(experts.manager.modules) == 1


def test_weights_of_a_module_lie_together_in_one_segment():
    experts = small_experts()
    with experts.manager.lease(experts.pages, Plane.WEIGHT, range(4)) as lease:
        first = lease.page(0, 0).data_ptr()
        offsets = [lease.page(e, s).data_ptr() - first for e in range(4) for s in range(3)]
    slot = experts.pages.slot_class(Plane.WEIGHT).nbytes
    assert offsets == [slot * i for i in range(12)]
    assert experts.manager.resident_bytes()["weight"] == 12 * slot
    assert experts.manager.arena.bytes_used == 12 * slot
    assert experts.manager.arena.bytes_reserved <= SEGMENT_BYTES  # nothing beyond the segment they are in


def test_pages_by_name_are_those_of_the_manager_in_the_order_given():
    experts = small_experts(manager=small_experts().manager)  # the second module: ids do not start at 0
    names = [(2, 1), (0, 0), (2, 0)]
    keys = [experts.manager.key(i) for i in experts.page_ids(Plane.GRADIENT, names).tolist()]
    assert [(key.plane, key.module, key.expert, key.slice) for key in keys] == [
        (Plane.GRADIENT, 1, expert, slice_) for expert, slice_ in names
    ]
    assert experts.page_ids(Plane.WEIGHT, []).tolist() == []
    with experts.lease(Plane.WEIGHT, names) as lease:
        assert lease.page(2, 1).numel() == experts.layout.page_numel(1)
        with pytest.raises(RuntimeError, match=r"module1\.experts, expert 2, slice 2 is used without a lease"):
            lease.page(2, 2)


@pytest.mark.parametrize("name", [(4, 0), (-1, 0), (0, 9)])
def test_a_page_that_there_is_not_is_named(name):
    experts = small_experts(rows=16)
    with pytest.raises(RuntimeError, match=rf"no expert {name[0]}, slice {name[1]}; it has 4 experts of \d+ slices"):
        experts.page_ids(Plane.WEIGHT, [(0, 0), name])

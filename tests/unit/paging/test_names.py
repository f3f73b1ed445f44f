"""Pages under the names, shapes and order of the stock experts class that would hold the same weights."""

import pytest
import torch

from megascale_omni.paging.layout import ExpertShape, PageLayout, Part
from megascale_omni.paging.names import NamedTensors, NamingStyle
from tests.unit.paging.neurons import Neurons, pages_of, random_neurons

E, H, F, ROWS = 3, 6, 37, 16  # three pages an expert, the last one of 5 neurons

STYLES: list[tuple[NamingStyle, bool, bool]] = [
    (style, gated, bias)
    for style in ("sequential", "te_grouped", "grouped", "hf", "hf_gpt_oss")
    for gated in (True, False)
    for bias in (True, False)
    if not (style == "grouped" and bias) and not (style == "hf_gpt_oss" and not gated)
]


def fc1_of(neurons: Neurons, *, interleaved: bool = False) -> torch.Tensor:
    """[(M-1) f, h]: all gate rows, then all up rows; or a gate row, an up row, the next gate row ..."""
    if Part.GATE not in neurons:
        return neurons[Part.UP]
    if interleaved:
        return torch.stack([neurons[Part.GATE], neurons[Part.UP]], dim=1).reshape(2 * F, H)
    return torch.cat([neurons[Part.GATE], neurons[Part.UP]])


def fc1_bias_of(neurons: Neurons, *, interleaved: bool = False) -> torch.Tensor:
    if Part.GATE_BIAS not in neurons:
        return neurons[Part.UP_BIAS]
    if interleaved:
        return torch.stack([neurons[Part.GATE_BIAS], neurons[Part.UP_BIAS]], dim=1).reshape(2 * F)
    return torch.cat([neurons[Part.GATE_BIAS], neurons[Part.UP_BIAS]])


def stock_tensors(style: NamingStyle, experts: list[Neurons]) -> dict[str, torch.Tensor]:
    """What the stock class would have, in the order of its ``named_parameters()``, written out expert by expert."""
    bias = Part.DOWN_BIAS in experts[0]
    tensors: dict[str, torch.Tensor] = {}
    if style == "sequential":
        for e, expert in enumerate(experts):
            tensors[f"local_experts.{e}.linear_fc1.weight"] = fc1_of(expert)
            if bias:
                tensors[f"local_experts.{e}.linear_fc1.bias"] = fc1_bias_of(expert)
            tensors[f"local_experts.{e}.linear_fc2.weight"] = expert[Part.DOWN].t()
            if bias:
                tensors[f"local_experts.{e}.linear_fc2.bias"] = expert[Part.DOWN_BIAS]
    elif style == "te_grouped":  # TE's GroupedLinear registers weight0, bias0, weight1, bias1 ...
        for e, expert in enumerate(experts):
            tensors[f"linear_fc1.weight{e}"] = fc1_of(expert)
            if bias:
                tensors[f"linear_fc1.bias{e}"] = fc1_bias_of(expert)
        for e, expert in enumerate(experts):
            tensors[f"linear_fc2.weight{e}"] = expert[Part.DOWN].t()
            if bias:
                tensors[f"linear_fc2.bias{e}"] = expert[Part.DOWN_BIAS]
    elif style == "grouped":
        tensors["weight1"] = torch.stack([fc1_of(e).t() for e in experts]).reshape(H, -1)
        tensors["weight2"] = torch.cat([e[Part.DOWN] for e in experts])
    else:
        oss = style == "hf_gpt_oss"
        fc1 = "gate_up_proj" if Part.GATE in experts[0] else "up_proj"
        weights = [fc1_of(e, interleaved=oss) for e in experts]
        tensors[fc1] = torch.stack([w.t() if oss else w for w in weights])
        if bias:
            tensors[f"{fc1}_bias"] = torch.stack([fc1_bias_of(e, interleaved=oss) for e in experts])
        tensors["down_proj"] = torch.stack([e[Part.DOWN] if oss else e[Part.DOWN].t() for e in experts])
        if bias:
            tensors["down_proj_bias"] = torch.stack([e[Part.DOWN_BIAS] for e in experts])
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


@pytest.fixture(params=STYLES, ids=lambda p: f"{p[0]}-{'gated' if p[1] else 'ungated'}-{'bias' if p[2] else 'plain'}")
def case(request):
    style, gated, bias = request.param
    layout = PageLayout(ExpertShape(hidden=H, ffn=F, gated=gated, bias=bias), ROWS)
    experts = [random_neurons(layout.shape) for _ in range(E)]
    names = NamedTensors(layout=layout, num_experts=E, style=style)
    return names, pages_of(layout, experts), stock_tensors(style, experts)


def test_names_shapes_and_order_are_those_of_the_stock_class(case):
    names, _, stock = case
    assert [(t.name, t.shape) for t in names.tensors()] == [(n, tuple(t.shape)) for n, t in stock.items()]
    assert [t.is_bias for t in names.tensors()] == ["bias" in name for name in stock]


def test_gathered_pages_are_the_stock_tensors(case):
    names, pages, stock = case
    out = {t.name: torch.full(t.shape, torch.nan) for t in names.tensors()}
    names.gather(pages, out)
    for name, tensor in stock.items():
        assert out[name].equal(tensor), name


def test_scattered_stock_tensors_are_the_pages(case):
    names, pages, stock = case
    back = {name: torch.full_like(page, torch.nan) for name, page in pages.items()}
    names.scatter(stock, back)
    for name, page in pages.items():
        assert back[name].equal(page), name


def test_each_element_of_the_stock_tensors_is_in_one_page(case):
    names, _, _ = case
    hits = {t.name: torch.zeros(t.shape) for t in names.tensors()}
    for item in names.named_slices():
        item.select(hits[item.tensor.name]).add_(1)
    assert all((count == 1).all() for count in hits.values())
    keys = [(s.expert, s.slice, names.layout.parts(s.slice).index(s.part)) for s in names.named_slices()]
    assert keys == sorted(set(keys))


def test_some_pages_alone_touch_their_own_regions_only(case):
    names, pages, stock = case
    some = {(1, 0): pages[1, 0], (2, 2): pages[2, 2]}
    out = {t.name: torch.full(t.shape, torch.nan) for t in names.tensors()}
    names.gather(some, out)
    written = sum(int((~t.isnan()).sum()) for t in out.values())
    assert written == sum(p.numel() for p in some.values())
    for name, tensor in out.items():
        assert tensor[~tensor.isnan()].equal(stock[name][~tensor.isnan()])


def test_some_tensors_alone_change_their_own_parts_only(case):
    names, pages, stock = case
    name = next(iter(stock))
    before = {key: page.clone() for key, page in pages.items()}
    names.scatter({name: torch.zeros_like(stock[name])}, pages)
    changed = sum(int((pages[key] != before[key]).sum()) for key in pages)
    assert changed == stock[name].numel()


def test_a_tensor_of_another_shape_is_refused_by_name(case):
    names, pages, stock = case
    name, tensor = next(iter(stock.items()))
    wrong = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 1)
    with pytest.raises(ValueError, match=f"{name} has shape .* the model needs"):
        names.scatter({name: wrong}, pages)


def test_gpt_oss_has_gates_at_even_and_ups_at_odd_places():
    layout = PageLayout(ExpertShape(hidden=2, ffn=32, gated=True, bias=True), 16)
    expert = random_neurons(layout.shape)
    names = NamedTensors(layout=layout, num_experts=1, style="hf_gpt_oss")
    out = {t.name: torch.empty(t.shape) for t in names.tensors()}
    names.gather(pages_of(layout, [expert]), out)
    gate_up = out["gate_up_proj"][0]  # [h, 2f]
    assert gate_up[:, ::2].equal(expert[Part.GATE].t())
    assert gate_up[:, 1::2].equal(expert[Part.UP].t())
    assert out["gate_up_proj_bias"][0, ::2].equal(expert[Part.GATE_BIAS])


@pytest.mark.parametrize(
    ("style", "gated", "bias", "message"),
    [
        ("mlp", True, False, "naming style 'mlp' is unknown; known: sequential, te_grouped"),
        ("hf_gpt_oss", False, True, "needs gated experts"),
        ("grouped", True, True, "has no biases"),
    ],
)
def test_a_style_that_does_not_exist_or_does_not_fit_is_refused(style, gated, bias, message):
    layout = PageLayout(ExpertShape(hidden=2, ffn=16, gated=gated, bias=bias), 16)
    with pytest.raises(ValueError, match=message):
        NamedTensors(layout=layout, num_experts=1, style=style)

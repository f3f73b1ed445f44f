"""The probe: steps of a few of the model's layers, and rates that give their times back."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from megascale_omni.experts.shards import PageShards
from megascale_omni.paging.layout import KIB
from megascale_omni.planner import probe, reach
from megascale_omni.planner.miniature import Miniature, StepTimes
from megascale_omni.planner.models import Attention, ModelCard, model_card
from megascale_omni.planner.prediction import Run, optimizer_bytes, passes_seconds, state_of
from megascale_omni.planner.reach import MOST_LAYERS

CPU = torch.device("cpu")
SIZES = {
    "num_layers": 6,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "seq_length": 16,
    "micro_batch_size": 2,
    "global_batch_size": 6,
}
OTHERS = {
    "plain": {},
    "bf16, gated, grouped": {
        "bf16": True,
        "swiglu": True,
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 6,
        "vocab_size": 1000,
    },
    "recompute, biases": {"recompute_granularity": "full", "disable_bias_linear": False},
}


def card(**changes: object) -> ModelCard:
    return model_card({**SIZES, **changes}, name="small")


def steps_of(model: Miniature, count: int = 2) -> list[StepTimes]:
    try:
        return probe._steps(model, count)
    finally:
        model.close()


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS.keys())
def test_a_step_of_a_miniature_trains_all_that_it_has(changes):
    model = Miniature(card(**changes), CPU, page_bytes=64 * KIB)
    assert (model.num_layers, model.number) == (MOST_LAYERS, 8)
    model.manager.schedule.begin_step(1)
    model.passes()
    assert all(float(main.norm()) > 0 for main in model._main), "every dense parameter has a gradient"
    assert model._gradients.squares(PageShards()) > 0
    routers = [weights[2].detach().clone() for weights in model._layers]
    model.step()
    model.manager.check_integrity()
    times = model.times
    assert 0 < times.experts < times.passes
    assert 0 < times.head < times.passes
    assert times.optimizer > 0
    assert times.row_share == pytest.approx(1.0)
    assert len(times.active) == MOST_LAYERS, "a forward that is made again does not count"
    assert all(0 < len(set(experts)) == len(experts) <= 8 for experts in times.active)
    assert all(torch.equal(weights[2], before) for weights, before in zip(model._layers, routers, strict=True))
    others = [weights[0].detach().clone() for weights in model._layers]
    model.manager.schedule.begin_step(2)
    model.passes()
    assert not any(torch.equal(weights[2], before) for weights, before in zip(model._layers, routers, strict=True))
    assert all(torch.equal(weights[0], before) for weights, before in zip(model._layers, others, strict=True))
    model.close()


def test_of_many_or_large_experts_some_are_made_and_their_rows_counted():
    with mock.patch.object(reach, "EXPERT_BYTES", 3 * MOST_LAYERS * card().expert.num_parameters * 4):
        model = Miniature(card(), CPU, page_bytes=64 * KIB)
    assert (model.num_layers, model.number) == (MOST_LAYERS, 3)
    times = steps_of(model)[-1]
    assert 0 < times.row_share < 1
    assert max(max(experts) for experts in times.active) > 2, "rows of the others are routed as well"
    with mock.patch.object(reach, "EXPERT_BYTES", 1):
        model = Miniature(card(), CPU, page_bytes=64 * KIB)
    assert (model.num_layers, model.number) == (1, 1)
    model.close()
    with mock.patch.object(reach, "ACTIVATION_BYTES", 1):
        assert reach.layers_made(card()) == 1


def test_a_text_leaves_experts_out_that_an_even_draw_would_not():
    """Some of 64 experts get none of 1024 bytes with eight choices each, as in a run; evenly drawn, all get some."""
    wide = card(num_layers=4, hidden_size=256, num_experts=64, moe_router_topk=8, moe_ffn_hidden_size=8)
    model = Miniature(replace(wide, seq_length=64, micro_batch_size=16), CPU, page_bytes=64 * KIB)
    model.passes()
    times, seconds = model.times, model.times.experts
    routed = model.routed(6)
    model.close()
    assert times.experts == seconds, "a step's times are its own"
    assert len(set(routed)) > 1, "routers are drawn apart"
    found = probe.Measured(mock.Mock(), tuple(routed))
    share = found.active_share(64)
    assert share is not None
    assert 0.9 < share < 0.999


def test_rates_give_the_times_of_a_step_back():
    """Of a layer as often as there are layers, of experts as often as there are rows."""
    model = card(recompute_granularity="full")
    times = [StepTimes(passes=1.0, experts=0.25, head=0.125, optimizer=0.5, row_share=0.5, active=((0, 1),))]
    run = Run(page_bytes=64 * KIB)
    with mock.patch.object(probe, "_steps", lambda miniature, count: times * count):
        with mock.patch.object(Miniature, "stepped_elements", 1000, create=True):
            device = probe.measure_here(model, page_bytes=64 * KIB).device
    layers = model.num_layers / MOST_LAYERS
    one = layers * (1.0 - 0.25 - 0.125) + 0.125 + layers * 0.25 / 0.5
    assert passes_seconds(model, device, run) == pytest.approx(3 * one, rel=0.05), "norms and position tables aside"
    bytes_ = optimizer_bytes(model, run, state_of(model, run))
    assert bytes_ / device.memory_bytes_s == pytest.approx(0.5 * bytes_ / 28 / 1000)


LARGE = {
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_experts": 256,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 2048,
    "vocab_size": 129_280,
    "seq_length": 4096,
    "micro_batch_size": 4,
    "global_batch_size": 8,
    "swiglu": True,
    "bf16": True,
}


def test_a_model_that_is_too_large_to_be_tried_has_fewer_tokens_experts_and_words():
    assert reach.in_reach(card(), CPU) == card()
    large = card(**LARGE)
    made = reach.in_reach(large, CPU)
    assert (made.micro_batch_size, made.seq_length) == (1, reach.LEAST_TOKENS)
    assert made.num_experts == made.moe_router_topk, "as many tokens each, as far as can be"
    assert 2 * made.vocabulary * made.hidden_size <= reach.HEAD_ELEMENTS
    assert reach.layers_made(made) == 1
    beside = reach.in_reach(large, torch.device("cuda"))
    assert beside.seq_length > made.seq_length, "which computes faster"
    assert beside.num_experts * 4 * 4096 == 256 * beside.micro_batch_size * beside.seq_length


def test_of_a_model_that_was_made_smaller_the_head_counts_as_it_is_and_no_routers_are_known():
    model = card(vocab_size=2048)
    times = [StepTimes(passes=1.0, experts=0.25, head=0.125, optimizer=0.5, row_share=0.5, active=((0, 1),))]
    with (
        mock.patch.object(probe, "_steps", lambda miniature, count: times * count),
        mock.patch.object(Miniature, "stepped_elements", 1000, create=True),
        mock.patch.multiple(reach, HEAD_ELEMENTS=2 * 256 * 32, ACTIVATION_BYTES=1, LEAST_TOKENS=8),
    ):
        found = probe.measure_here(model, page_bytes=64 * KIB)
    assert found.routed is None
    assert found.active_share(8) is None
    layers = model.num_layers  # of which one is made
    one = layers * (1.0 - 0.25 - 0.125) + 8 * 0.125 + layers * 0.25 / 0.5
    tokens = model.micro_batch_size * model.seq_length / 8  # of a sequence of eight
    expected = tokens * one * model.global_batch_size / model.micro_batch_size
    assert passes_seconds(model, found.device, Run(page_bytes=64 * KIB)) == pytest.approx(expected, rel=0.1)


def test_where_no_token_finds_an_expert_that_is_made_all_are_made():
    few = card(num_experts=256, moe_router_topk=1, seq_length=1, micro_batch_size=1, bf16=True)
    with mock.patch.object(reach, "EXPERT_BYTES", 1), mock.patch.object(probe, "REPEATS", 1):
        found = probe.measure_here(few, page_bytes=64 * KIB)
    assert found.routed is None
    assert found.device.experts > 0


def test_memory_is_given_back_where_pages_will_leave_as_in_the_run():
    called = []
    with (
        mock.patch.object(probe, "give_large_blocks_back", side_effect=lambda: called.append(1)),
        mock.patch.object(probe, "REPEATS", 1),
    ):
        probe.measure_here(card(), page_bytes=64 * KIB)
        assert not called
        probe.measure_here(card(), page_bytes=64 * KIB, gives_back=True)
    assert called or torch.cuda.is_available()


def test_heads_are_those_of_the_model():
    assert card().attention == Attention(heads=4, groups=4, channels=8)
    found = card(group_query_attention=True, num_query_groups=2, kv_channels=16)
    assert found.attention == Attention(heads=4, groups=2, channels=16)
    assert (card().vocabulary, card(vocab_size=300).vocabulary) == (256, 384)
    assert card().rotary
    assert not card(position_embedding_type="learned_absolute").rotary
    assert card(num_attention_heads=None, dense_parameters=5, hidden_size=128).attention.heads == 2
    with pytest.raises(ValueError, match="num_attention_heads=4 cannot be divided by num_query_groups=3"):
        card(group_query_attention=True, num_query_groups=3)

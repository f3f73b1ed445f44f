"""Megatron's fused tensors and Hugging Face's, there and back, for any number of heads and groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale_omni.checkpoint.model_names import Attention, Cut, ModelNames, Rule, fuse, path_in_hf, split

QKV = Rule(("linear_qkv",), ("q", "k", "v"), Cut.ATTENTION)
HALVES = Rule(("linear_fc1",), ("gate", "up"), Cut.HALVES)
RESTS = st.sampled_from([(), (3,), (2, 3)])


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


@given(groups=st.integers(1, 4), queries=st.integers(1, 4), head=st.integers(1, 5), rest=RESTS)
def test_attention_there_and_back(groups, queries, head, rest):
    attention, rows = Attention(groups * queries, groups), groups * (queries + 2) * head
    fused = numbers(rows, *rest)
    parts = split(QKV, fused, attention)
    assert torch.equal(fuse(QKV, parts, attention), fused)
    assert [part.shape[0] for part in parts] == [groups * queries * head, groups * head, groups * head]
    others = [part + 0.5 for part in parts]
    for part, again in zip(others, split(QKV, fuse(QKV, others, attention), attention), strict=True):
        assert torch.equal(part, again)
    for row in range(rows):  # slowly: the row's group, head in it, and place in the head
        group, inside = divmod(row, (queries + 2) * head)
        which, place = divmod(inside, head)
        if which < queries:
            expected = parts[0][(group * queries + which) * head + place]
        else:
            expected = parts[which - queries + 1][group * head + place]
        assert torch.equal(fused[row], expected)


@given(rows=st.integers(1, 6), rest=RESTS)
def test_gate_and_up_there_and_back(rows, rest):
    fused, attention = numbers(2 * rows, *rest), Attention(1, 1)
    gate, up = split(HALVES, fused, attention)
    assert torch.equal(gate, fused[:rows])
    assert torch.equal(fuse(HALVES, [gate, up], attention), fused)


def test_what_cannot_be_cut_is_named():
    with pytest.raises(ValueError, match="5 attention heads cannot be divided into 2 query groups"):
        Attention(5, 2)
    with pytest.raises(ValueError, match="linear_qkv has 7 rows: not those of 2 heads in 1 groups"):
        split(QKV, numbers(7, 2), Attention(2, 1))
    with pytest.raises(ValueError, match="linear_fc1 has 3 rows"):
        split(HALVES, numbers(3), Attention(1, 1))
    with pytest.raises(ValueError, match=r"q, k, v are \(4, 2\), \(2, 2\), \(4, 2\), which is not 2 heads in 1 groups"):
        fuse(QKV, [numbers(4, 2), numbers(2, 2), numbers(4, 2)], Attention(2, 1))
    with pytest.raises(ValueError, match=r"gate is \(2,\), up \(3,\)"):
        fuse(HALVES, [numbers(2), numbers(3)], Attention(1, 1))


@pytest.mark.parametrize("gated_shared", [False, True])
def test_every_name_has_one_place(gated_shared):
    """No two of Megatron's tensors become one, and no two spellings occur in one model."""
    names = ModelNames(gated_shared=gated_shared)
    found = names.find("decoder.layers.3.self_attention.linear_qkv.weight")
    assert found is not None
    assert found[1] == tuple(f"model.layers.3.self_attn.{part}_proj.weight" for part in "qkv")
    shared = names.find("decoder.layers.0.mlp.shared_experts.linear_fc2.weight")
    assert shared is not None
    assert shared[1] == (f"model.layers.0.mlp.shared_expert{'' if gated_shared else 's'}.down_proj.weight",)
    targets = [part for rule in set(names.rules) for part in rule.hf]
    assert len(targets) == len(set(targets))


@pytest.mark.parametrize(
    "key",
    [
        "embedding.position_embeddings.weight",
        "decoder.layers.0.self_attention.linear_q_down_proj.weight",
        "decoder.layers.mlp.router.weight",
        "decoder.layers.0.output_layer.weight",
        "mlp.router.weight",
    ],
)
def test_what_has_no_place(key):
    assert ModelNames(gated_shared=False).find(key) is None


def test_paths_of_experts():
    assert path_in_hf("decoder.layers.11.mlp.experts") == "model.layers.11.mlp.experts"
    for path in ("decoder.layers.1.cross.experts", "encoder.layers.1.mlp.experts", "mtp.layers.0.mlp.experts"):
        with pytest.raises(ValueError, match="have no place in a Hugging Face model"):
            path_in_hf(path)

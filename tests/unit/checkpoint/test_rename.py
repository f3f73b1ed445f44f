"""A Megatron run's checkpoint under Hugging Face's names and back, and as DeepSpeed's universal one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megascale_omni import cli
from megascale_omni.checkpoint.assemble import Assembly, ModuleSource, PageSource, Source, write
from megascale_omni.checkpoint.checkpointer import Checkpointer
from megascale_omni.checkpoint.hf_view import hf_view
from megascale_omni.checkpoint.megatron_keys import MOMENTS, numbered
from megascale_omni.checkpoint.opening import Opened
from megascale_omni.paging.layout import ExpertShape, PageLayout
from megascale_omni.paging.planes import Plane
from tests.integration.megatron_ext.stored import contents, different

LAYERS, HIDDEN, HEADS, GROUPS, HEAD, EXPERTS, STEPS = 2, 4, 4, 2, 3, 2, 3
SHAPE = ExpertShape(hidden=HIDDEN, ffn=6, gated=True, bias=False)
LAYER = {
    "self_attention.linear_qkv.weight": ((HEADS + 2 * GROUPS) * HEAD, HIDDEN),
    "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
    "self_attention.q_layernorm.weight": (HEAD,),
    "self_attention.linear_proj.weight": (HIDDEN, HEADS * HEAD),
    "mlp.linear_fc1.layer_norm_weight": (HIDDEN,),
    "mlp.router.weight": (EXPERTS, HIDDEN),
    "mlp.shared_experts.linear_fc1.weight": (10, HIDDEN),
    "mlp.shared_experts.linear_fc2.weight": (HIDDEN, 5),
    "mlp.shared_experts.gate_weight": (1, HIDDEN),
}
MODEL = {"embedding.word_embeddings.weight": (7, HIDDEN), "decoder.final_layernorm.weight": (HIDDEN,)}
ARGS = {"num_attention_heads": HEADS, "group_query_attention": True, "num_query_groups": GROUPS}


def megatrons(
    root: Path, *, stacked: bool, optimizer: bool = True, more: dict[str, tuple[int, ...]] | None = None
) -> Path:
    """A checkpoint as a Megatron run would have saved it, with numbers that tell every element from every other."""
    generator = torch.Generator().manual_seed(1)

    def source(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Source:
        tensor = torch.rand(shape, generator=generator).to(dtype)
        return Source(dtype, shape, partial(torch.clone, tensor))

    shapes = dict(MODEL) | (more or {})
    for name, shape in LAYER.items():
        for layer in range(1 if stacked else LAYERS):
            key = f"decoder.layers.{name}"
            shapes[key if stacked else numbered(key, layer)] = (LAYERS, *shape) if stacked else shape
    assembly = Assembly(
        step=STEPS,
        values={
            "run": {"args": ARGS, "consumed_samples": 24},
            "schedule": {"num_steps": 24, "max_lr": 0.1},
            "optimizer": optimizer,
            "rng": True,
            "clipping": {"skipped_steps": 1},
            "paging_step": STEPS,
            "stock": {"form": "float16", "separate": False, "groups": [[{"lr": 0.1}]], "steps": STEPS},
        },
        versions={"megatron-core": "0.16.1"},
    )
    for key, shape in shapes.items():
        assembly.dense[f"model.{key}"] = source(shape, torch.bfloat16)
        for kind in ("param", *MOMENTS) if optimizer else ():
            assembly.dense[f"optimizer.{kind}.{key}"] = source(shape)
        if optimizer:
            steps = torch.full(shape[:1] if key.startswith("decoder.layers.") and stacked else (1,), float(STEPS))
            assembly.dense[f"optimizer.step.{key}"] = Source(
                steps.dtype, tuple(steps.shape), partial(torch.clone, steps)
            )
    for name in ("torch", "tracker.model-parallel-rng"):
        assembly.dense[f"rng.pp0.tp0.dp1.{name}"] = source((5,))
    layout = PageLayout(SHAPE, rows=4)
    for layer in range(LAYERS):
        path = f"decoder.layers.{layer}.mlp.experts"
        bound = (0, None) if optimizer else None
        assembly.modules[path] = ModuleSource(SHAPE, EXPERTS, "sequential", bound, heat=[{"experts": [0, 1]}])
        for expert in range(EXPERTS):
            for slice_ in range(layout.num_slices):
                numel, neurons = layout.page_numel(slice_), layout.neurons(slice_)
                planes = {"weight": source((numel,), torch.bfloat16)}
                planes |= {label: source((numel,)) for label in ("master", "moment1", "moment2") if optimizer}
                assembly.pages.append(PageSource((path, expert, neurons.start), neurons.stop, planes))
    assembly.optimizer = (STEPS, "torch_adamw", [{"lr": 0.1}]) if optimizer else None
    return write(root, "iter_0000003", assembly)


def convert(*words: object) -> None:
    assert cli.main(["checkpoint", "convert", *map(str, words)]) == 0


def refusal(capsys, *words: object) -> str:
    assert cli.main(["checkpoint", "convert", *map(str, words)]) == 1
    text: str = capsys.readouterr().err
    return text


def opened(root: Path) -> Opened:
    found = Checkpointer(root).open()
    assert found is not None
    return found


@pytest.mark.parametrize("stacked", [True, False])
def test_there_and_back_is_bit_for_bit_what_it_was(tmp_path, stacked):
    """Weights, masters, moments, steps, pages, heat, what clipping has measured, place in the data."""
    megatrons(tmp_path / "m", stacked=stacked)
    convert(tmp_path / "m", tmp_path / "h", "--to", "paged", "--names", "hf")
    theirs = opened(tmp_path / "h")
    assert theirs.manifest.tag == "global_step3"
    assert theirs.manifest.values["position"]["global_samples"] == 24
    assert theirs.manifest.values["clipping"] == {"skipped_steps": 1}
    assert theirs.pages.heat["model.layers.1.mlp.experts"] == [{"experts": [0, 1]}]
    assert "rng.1.torch" in theirs.dense.tensors
    assert not [name for name in theirs.dense.tensors if "tracker" in name]
    convert(tmp_path / "h", tmp_path / "b", "--to", "paged", "--names", "megatron", "--like", tmp_path / "m")
    assert different(contents(tmp_path / "m"), contents(tmp_path / "b")) == []
    back, first = opened(tmp_path / "b"), opened(tmp_path / "m")
    assert back.manifest.values == {**first.manifest.values, "rng": False}
    assert back.pages.heat == first.pages.heat
    assert back.pages.modules == first.pages.modules


def test_names_and_cuts(tmp_path):
    megatrons(tmp_path / "m", stacked=True)
    first = opened(tmp_path / "m")
    view = hf_view(first)
    fused = first.dense.read("optimizer.exp_avg.decoder.layers.self_attention.linear_qkv.weight")[1]
    per_group = (HEADS // GROUPS + 2) * HEAD
    keys = torch.cat([fused[g * per_group + 2 * HEAD : g * per_group + 3 * HEAD] for g in range(GROUPS)])
    assert torch.equal(view.dense["optimizer.exp_avg.model.layers.1.self_attn.k_proj.weight"].read(), keys)
    shared = first.dense.read("model.decoder.layers.mlp.shared_experts.linear_fc1.weight")[0]
    assert torch.equal(view.dense["model.model.layers.0.mlp.shared_expert.up_proj.weight"].read(), shared[5:])
    assert view.steps == STEPS
    assert dict(view.experts("model.layers.0.mlp.experts", Plane.MOMENT1))["gate_up_proj"].shape == (
        EXPERTS,
        12,
        HIDDEN,
    )


def test_to_hugging_faces_folder(tmp_path):
    megatrons(tmp_path / "m", stacked=True, optimizer=False)
    convert(tmp_path / "m", tmp_path / "hf", "--to", "hf")
    found, first = load_file(tmp_path / "hf" / "model.safetensors"), opened(tmp_path / "m")
    embedding = first.dense.read("model.embedding.word_embeddings.weight")
    assert torch.equal(found["model.embed_tokens.weight"], embedding)
    assert found["model.layers.1.mlp.experts.down_proj"].shape == (EXPERTS, HIDDEN, SHAPE.ffn)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_to_deepspeeds_universal_format(tmp_path):
    megatrons(tmp_path / "m", stacked=True)
    convert(tmp_path / "m", tmp_path / "u", "--to", "deepspeed")
    folder = tmp_path / "u" / (tmp_path / "u" / "latest_universal").read_text()
    view = hf_view(opened(tmp_path / "m"))

    def read(*path: str) -> Any:
        return torch.load(folder.joinpath("zero", *path), weights_only=True)

    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.v_proj.weight"):
        for theirs, ours in (("fp32", "param"), *((moment, moment) for moment in MOMENTS)):
            assert torch.equal(read(name, f"{theirs}.pt")["param"], view.dense[f"optimizer.{ours}.{name}"].read())
        assert read(name, "step.pt") == STEPS
    experts = dict(view.experts("model.layers.0.mlp.experts", Plane.MOMENT2))["down_proj"].read()
    assert torch.equal(read("model.layers.0.mlp.experts.down_proj", "exp_avg_sq.pt")["param"], experts)
    assert (folder / "zero_pp_rank_0_mp_rank_00_model_states.pt").is_file()
    convert(tmp_path / "u", tmp_path / "r", "--to", "paged", "--style", "hf", "--page-size", "64KiB")
    again = hf_view(opened(tmp_path / "r"))
    assert again.steps == STEPS
    assert again.dense.keys() == view.dense.keys()
    for name, source in view.dense.items():
        kept = not name.startswith("model.")  # weights are rounded from masters, which are made up here
        assert torch.equal(again.dense[name].read(), source.read()) or not kept
    for path in view.modules:
        for plane in (Plane.MASTER, Plane.MOMENT1, Plane.MOMENT2):
            found = {name: source.read() for name, source in again.experts(path, plane)}
            assert all(torch.equal(found[name], source.read()) for name, source in view.experts(path, plane))


def test_what_cannot_be_renamed_is_named(tmp_path, capsys):
    megatrons(tmp_path / "m", stacked=True)
    megatrons(tmp_path / "w", stacked=True, optimizer=False)
    megatrons(tmp_path / "p", stacked=True, more={"embedding.position_embeddings.weight": (9, HIDDEN)})
    to_hf = ("--to", "paged", "--names", "hf")
    assert "has model.embedding.position_embeddings.weight" in refusal(
        capsys, tmp_path / "p", tmp_path / "x", *to_hf
    ).replace("optimizer.exp_avg", "model").replace("optimizer.exp_avg_sq", "model")
    assert "--names megatron needs --like" in refusal(
        capsys, tmp_path / "m", tmp_path / "x", "--to", "paged", "--names", "megatron"
    )
    assert "--names is for a checkpoint that is paged" in refusal(
        capsys, tmp_path / "m", tmp_path / "x", "--to", "hf", "--names", "hf"
    )
    assert "has no optimizer state" in refusal(capsys, tmp_path / "w", tmp_path / "x", "--to", "deepspeed")
    convert(tmp_path / "m", tmp_path / "h", *to_hf)
    assert "has Hugging Face's names already" in refusal(capsys, tmp_path / "h", tmp_path / "x", *to_hf)
    back = ("--to", "paged", "--names", "megatron", "--like")
    assert "is not one of a Megatron run: give one as --like" in refusal(
        capsys, tmp_path / "h", tmp_path / "x", *back, tmp_path / "h"
    )
    assert "does not have anything that model.embedding.position_embeddings.weight could be made of" in refusal(
        capsys, tmp_path / "h", tmp_path / "x", *back, tmp_path / "p"
    )
    assert not (tmp_path / "x").exists() or not list((tmp_path / "x").iterdir())

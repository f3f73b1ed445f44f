"""Hugging Face's folders become checkpoints and checkpoints become folders, to the bit."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from megascale_omni import cli
from megascale_omni.checkpoint.checkpointer import Checkpointer
from megascale_omni.checkpoint.convert_hf import to_hf
from megascale_omni.checkpoint.plain import Training, load_checkpoint, save_checkpoint
from megascale_omni.experts.shards import PageShards
from megascale_omni.optimizer.arithmetic import TorchAdamW
from megascale_omni.optimizer.paged_adam import GroupBinding, PagedAdam
from megascale_omni.paging.names import NamingStyle
from megascale_omni.paging.planes import Plane
from tests.unit.experts.paged import HIDDEN, small_experts

STYLES: list[NamingStyle] = ["hf", "hf_transposed", "hf_gpt_oss", "hf_interleaved"]


class Model(torch.nn.Module):
    def __init__(self, *, style: NamingStyle = "hf", bias: bool = False, dtype=torch.float32, rows: int = 16) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(HIDDEN, 5, dtype=dtype)
        self.experts = small_experts(style=style, bias=bias, dtype=dtype, gradient_dtype=torch.float32, rows=rows)


def stepped(model: Model) -> PagedAdam:
    """An optimizer that made three steps, in which some experts were left behind."""
    experts = model.experts
    if experts.pages.dtypes[Plane.WEIGHT] is not torch.float32:
        experts.manager.set_plane_dtype(experts.pages, Plane.MASTER, torch.float32)
    for plane in (Plane.MOMENT1, Plane.MOMENT2):
        experts.manager.set_plane_dtype(experts.pages, plane, torch.float32)
    group = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "params": []}
    bound = GroupBinding(0, 0 if experts.shape.bias else None)
    adam = PagedAdam([(experts, bound)], groups=[group], arithmetic=TorchAdamW(), shards=PageShards())
    for expert in (0, 1, 0):
        ids = experts.manager.create(experts.pages, Plane.GRADIENT, [expert])
        with experts.manager.lease_ids(experts.pages, Plane.GRADIENT, ids) as lease:
            lease.mark_dirty()
            for key in map(experts.manager.key, ids.tolist()):
                lease.page(key.expert, key.slice).normal_()
        adam.step()
        experts.manager.drop(ids)
    return adam


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("style", STYLES)
def test_there_and_back(tmp_path, capsys, style, dtype):
    model = Model(style=style, bias=style == "hf_gpt_oss", dtype=dtype)
    save_checkpoint(tmp_path / "run", "t3", Training(model, None, stepped(model)), step=3)
    assert cli.main(["checkpoint", "convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "hf")
    expected = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), expected)
    words = ["--to", "paged", "--page-size", "64KiB", "--tag", "again", "--style", style]
    assert cli.main(["checkpoint", "convert", str(tmp_path / "hf"), str(tmp_path / "back"), *words]) == 0
    other = Model(style=style, bias=style == "hf_gpt_oss", dtype=dtype, rows=8)
    assert load_checkpoint(tmp_path / "back", Training(other), include_optimizer=False, include_rng_state=False)
    assert_same({name: tensor.detach() for name, tensor in other.state_dict().items()}, expected)


def test_large_models_take_several_files(tmp_path):
    model = Model()
    save_checkpoint(tmp_path / "run", "t", Training(model), step=0)
    opened = Checkpointer(tmp_path / "run").open()
    assert opened is not None
    (tmp_path / "like").mkdir()
    (tmp_path / "like" / "config.json").write_text('{"model_type": "x"}')
    save_file({"old": torch.zeros(1)}, tmp_path / "like" / "model.safetensors")
    to_hf(opened, tmp_path / "hf", like=tmp_path / "like", shard_bytes=10_000)
    files = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert "config.json" in files
    assert "model.safetensors.index.json" in files
    assert len([name for name in files if name.endswith(".safetensors")]) > 2
    found: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "hf").glob("*.safetensors"):
        found |= load_file(path)
    assert_same(found, {name: tensor.detach() for name, tensor in model.state_dict().items()})


def refusal(capsys, *words) -> str:
    assert cli.main(["checkpoint", "convert", *map(str, words)]) == 1
    text: str = capsys.readouterr().err
    return text


def test_what_does_not_convert_is_refused(tmp_path, capsys):
    source, target = tmp_path / "source", tmp_path / "target"
    assert "is not a folder" in refusal(capsys, source, target, "--to", "paged")
    source.mkdir()
    assert "no checkpoint of a known format: paged, torch_dist, hf, deepspeed" in refusal(
        capsys, source, target, "--to", "paged"
    )
    old = tmp_path / "theirs" / "iter_0000003" / "mp_rank_00_001" / "model_optim_rng.pt"
    old.parent.mkdir(parents=True)
    old.touch()
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("3")
    for folder in (tmp_path / "theirs", tmp_path / "theirs" / "iter_0000003"):
        assert re.search(
            "Megatron's old format torch: .* --ckpt-format torch_dist", refusal(capsys, folder, target, "--to", "paged")
        )
    square = torch.zeros(2, 8, 8)
    save_file({"a.experts.up_proj": square, "a.experts.down_proj": square.clone()}, source / "model.safetensors")
    assert "both orientations fit; say which with --style" in refusal(capsys, source, target, "--to", "paged")
    assert "style 'sequential' is none" in refusal(capsys, source, target, "--to", "paged", "--style", "sequential")
    assert "is hf already" in refusal(capsys, source, target, "--to", "hf")
    assert "convert goes from paged to another format, or back" in refusal(capsys, source, target, "--to", "deepspeed")
    save_file({"a.experts.gate_up_proj": square}, source / "model.safetensors")
    assert "a.experts has only gate_up_proj" in refusal(capsys, source, target, "--to", "paged")
    save_file({"a.experts.0.w1.weight": square[0]}, source / "model.safetensors")
    assert "each expert's tensors by themselves" in refusal(capsys, source, target, "--to", "paged")
    (source / "model.safetensors").write_bytes(b"\xff" * 30)
    assert "model.safetensors is damaged" in refusal(capsys, source, target, "--to", "paged")
    assert not target.exists() or not list(target.iterdir())


def test_megatrons_experts_are_not_hugging_faces(tmp_path, capsys):
    model = Model(style="sequential")
    save_checkpoint(tmp_path / "run", "t", Training(model), step=0)
    assert "names of experts are not Hugging Face's (sequential)" in refusal(
        capsys, tmp_path / "run", tmp_path / "hf", "--to", "hf"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

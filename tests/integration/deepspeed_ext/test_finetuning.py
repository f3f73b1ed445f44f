"""The fine-tuning script: training, a checkpoint, going on from it, export, and the comparison with stock."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megascale_omni.clipping.record import read_clip_record
from scripts.deepspeed_runs.main import main

ROOT = Path(__file__).resolve().parents[3]
SMALL = ["--length", "16"]


def finetune(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/finetune_hf_moe.py", *flags, *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, env=environment, check=False)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(Path(__file__).read_text() * 20)
    return str(path)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> str:
    from scripts.deepspeed_runs.models import Size, build, configuration

    folder = tmp_path_factory.mktemp("model")
    size = Size(vocabulary=256, experts=4, layers=1)
    model: Any = build(configuration("mixtral", size), seed=1)
    model.save_pretrained(folder)
    return str(folder)


def test_a_published_model_streamed_trained_and_published_again(text: str, published: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    out, lines, config = tmp_path / "out", tmp_path / "steps.jsonl", tmp_path / "clipped.json"
    section = json.loads((ROOT / "configs/deepspeed/zero2.json").read_text())
    section["megascale"]["clip"] = {"mode": "cmsa", "alpha": 0.35}
    config.write_text(json.dumps(section))
    flags = ["--deepspeed", str(config), "--model", published, "--stream", "--data-path", text, "--steps", "3"]
    done = finetune(*flags, "--export", str(out), "--save", str(tmp_path / "saved"), "--metrics-jsonl", str(lines))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("megascale: 4 experts of 1 layer in ") == done.stdout.count("megascale: ") == 1
    assert done.stdout.count("loss") >= 3
    names = {name for path in out.glob("*.safetensors") for name in load_file(path)}
    assert names >= {name for path in Path(published).glob("*.safetensors") for name in load_file(path)}
    assert (tmp_path / "saved" / "global_step3" / "megascale" / "manifest.json").exists()
    record = read_clip_record(lines)
    assert record.steps == (1, 2, 3)
    assert [module.name for module in record.modules] == ["embedding", "dense_0", "experts_0"]


def test_comparison(text: str, published: str, tmp_path: Path) -> None:
    json_path = tmp_path / "found.json"
    flags = ["--deepspeed", "configs/deepspeed/zero1.json", "--model", published, "--data-path", text]
    done = finetune(*flags, "--compare", "--steps", "2", "--warmup", "1", "--repeats", "2", "--json", str(json_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(json_path.read_text())
    assert [run["name"] for run in found["runs"]] == ["stock", "megascale"]
    assert [run["experts"] for run in found["runs"]] == ["MixtralExperts", "HfExperts"]
    assert found["max_relative_loss_difference"] <= 1e-5
    assert found["max_relative_grad_norm_difference"] <= 1e-5


def test_mistakes_are_said_in_a_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--deepspeed", "missing.json", "--data-path", text]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("finetune_hf_moe.py: DeepSpeed configuration missing.json")

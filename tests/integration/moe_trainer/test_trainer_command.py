"""`scripts/pretrain_moe.py` as a person starts it: in processes of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.integration.moe_trainer.ranks import MODEL

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = str(ROOT / "scripts" / "pretrain_moe.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]


def start(command: Sequence[str], flags: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run to the end, from another folder than the project's."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PYTHONPATH"):
        environment.pop(name, None)
    return subprocess.run(
        [*command, SCRIPT, *flags],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_of_one_process(corpus: str, tmp_path: Path) -> None:
    metrics = tmp_path / "out" / "metrics.jsonl"
    flags = [
        *MODEL.split(),
        "--data-path",
        corpus,
        "--eval-interval",
        "4",
        "--log-interval",
        "3",
        "--save",
        "checkpoints",
    ]
    flags += ["--metrics-jsonl", str(metrics), "--tensorboard-dir", "board", "--exit-interval", "5"]
    done = start([sys.executable], flags, tmp_path)
    assert done.returncode == 0, done.stderr
    written = records(metrics)
    assert [record["event"] for record in written] == [
        *["start", "step", "step", "step", "step", "validation", "step", "validation", "checkpoint", "end"]
    ]
    first, last = written[0], written[-1]
    assert (first["experts_class"], first["dispatcher"]) == ("SequentialMLP", "MoEAllGatherTokenDispatcher")
    assert (first["optimizer"], first["optimizers"]) == ("ChainedOptimizer", ["FP32Optimizer"])
    assert (first["world"], first["tokens_per_step"], first["argv"]) == (1, 128, flags)
    assert last["reason"] == "exit_interval"
    steps = [record for record in written if record["event"] == "step"]
    assert {
        "loss",
        "grad_norm",
        "num_zeros",
        "params_norm",
        "lr",
        "step_seconds",
        "tokens_per_second",
        "rss_bytes",
    } <= set(steps[0])
    assert [record["iteration"] for record in steps] == [1, 2, 3, 4, 5]
    assert int(str(last["peak_rss_bytes"])) >= int(str(steps[-1]["rss_bytes"])) > 1 << 26
    lines = done.stdout.splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("iteration")] == ["iteration 3/6"]
    assert list((tmp_path / "board").glob("events.out.tfevents.*"))
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "5"


def test_a_loss_that_is_not_finite_ends_the_run(corpus: str, tmp_path: Path) -> None:
    flags = [*MODEL.split(), "--data-path", corpus, "--init-method-std", "1e30", "--metrics-jsonl", "metrics.jsonl"]
    done = start([sys.executable], flags, tmp_path)
    assert done.returncode == 1
    assert "found NaN in local forward loss calculation" in done.stderr
    reason = records(tmp_path / "metrics.jsonl")[-1]["reason"]
    assert "iteration 1: Unexpected result nan" in str(reason)


def test_a_mistake_ends_every_rank_and_is_told_once(corpus: str, tmp_path: Path) -> None:
    flags = [*MODEL.split(), "--data-path", corpus, "--expert-model-parallel-size", "2", "--seq-length", "1000000"]
    done = start(TORCHRUN, flags, tmp_path)
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("pretrain_moe.py: error:")]
    assert len(told) == 1
    assert "the corpus is too short" in told[0]
    assert done.stderr.count("exitcode  : 2") == 2
    assert list(tmp_path.iterdir()) == []
